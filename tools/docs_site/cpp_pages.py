"""Pages of the public headers of C++ and C, from what doxygen reads there."""

from __future__ import annotations

import itertools
import re
import subprocess
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["HEADERS", "page_of", "pages"]

ROOT = Path(__file__).resolve().parents[2]
HEADERS = "cpp/include/recsdk"
XML = ROOT / "build" / "doxygen" / "xml"
WIDTH = 88
IS_NOT_SHOWN = {"export.h"}

Element = ET.Element


def page_of(header: str) -> str:
    """The path in the site of the page of a header, as `table.h` or `serving/c_api.h`."""
    return f"reference/cpp/{header.replace('.', '_').replace('/', '_')}.md"


def pages() -> dict[str, str]:
    """Markdown by path in the site: a page for each header."""
    subprocess.run(["doxygen", "tools/docs_site/Doxyfile"], cwd=ROOT, check=True)
    entries = by_header(sorted(XML.glob("*.xml")))
    home = ROOT / HEADERS
    headers = [path.relative_to(home).as_posix() for path in sorted(home.rglob("*.h"))]
    return {page_of(h): page(h, entries.get(h, [])) for h in headers if h not in IS_NOT_SHOWN}


def by_header(files: Iterable[Path]) -> dict[str, list[Element]]:
    """Types, functions and constants of each header, in the order in which they stand."""
    found: dict[str, dict[str, Element]] = defaultdict(dict)
    for xml in files:
        for element in entries_of(ET.parse(xml).getroot()):
            location = element.find("location")
            path = location.get("file", "") if location is not None else ""
            _, is_header, name = path.partition(f"{HEADERS}/")
            if is_header:
                found[name].setdefault(element.get("id", ""), element)
    return {header: sorted(each.values(), key=line_of) for header, each in found.items()}


def entries_of(root: Element) -> Iterator[Element]:
    for compound in root.iter("compounddef"):
        name = compound.findtext("compoundname", "")
        if "internal" in name or name == "std":
            continue
        if compound.get("kind") in ("class", "struct"):
            yield compound
        elif compound.get("kind") in ("namespace", "file"):
            yield from compound.iter("memberdef")


def line_of(element: Element) -> int:
    location = element.find("location")
    return int(location.get("line", "0")) if location is not None else 0


# ---- Markdown ----------------------------------------------------------------------------------


def page(header: str, entries: list[Element]) -> str:
    source = (ROOT / HEADERS / header).read_text().splitlines()
    head = itertools.takewhile(lambda line: line.startswith("//"), source)
    about = "\n".join(line.lstrip("/").removeprefix(" ") for line in head)
    include = f"```cpp\n#include <recsdk/{header}>\n```"
    structs = {entry.findtext("compoundname", "") for entry in entries} - {""}
    shown = [entry for entry in entries if not says_nothing_new(entry, structs)]
    return "\n\n".join([f"# {header}", escaped(about), include, *map(entry_text, shown)]) + "\n"


def says_nothing_new(entry: Element, structs: set[str]) -> bool:
    """Include guards, and C's second names of structs that are described."""
    name = entry.findtext("name", "")
    return name.endswith("_H") or (entry.get("kind") == "typedef" and name in structs)


def entry_text(entry: Element) -> str:
    if entry.tag == "compounddef":
        return compound_text(entry)
    kind, name = entry.get("kind", ""), entry.findtext("name", "")
    if kind == "enum":
        return f"{heading(2, name, 'enum ' + name)}\n\n{text_of(entry)}\n\n{enumerators(entry)}"
    return f"{heading(2, name, name)}\n\n{code(declaration(entry))}\n\n{text_of(entry)}"


def compound_text(compound: Element) -> str:
    name = compound.findtext("compoundname", "").removeprefix("recsdk::")
    public = [m for m in compound.iter("memberdef") if m.get("prot") == "public"]
    fields = [m for m in public if m.get("kind") == "variable"]
    others = [m for m in public if m.get("kind") in ("function", "enum", "typedef")]
    bases = ", ".join(base.text or "" for base in compound.findall("basecompoundref"))
    parts = [heading(2, name, f"{compound.get('kind')} {name}")]
    parts += [f"Has all of `{bases.removeprefix('recsdk::')}`."] if bases else []
    parts += [text_of(compound)]
    parts += [field_table(fields)] if fields else []
    return "\n\n".join([*parts, *methods(name, others)])


def methods(owner: str, members: list[Element]) -> Iterator[str]:
    """Declarations that share a comment stand together, above it."""
    group: list[Element] = []
    for member, after in itertools.zip_longest(members, members[1:]):
        group.append(member)
        has_own_text = after is not None and bool(text_of(after))
        if after is None or has_own_text or line_of(after) > line_of(member) + 4:
            name = group[0].findtext("name", "")
            about = "\n\n".join(filter(None, map(text_of, group)))
            listing = code("\n".join(map(declaration, group)))
            yield f"{heading(3, f'{owner}-{name}', name)}\n\n{listing}\n\n{about}"
            group = []


def field_table(fields: list[Element]) -> str:
    rows = ["| field | type | default | what it is |", "|---|---|---|---|"]
    for field in fields:
        default = initializer(field).lstrip("= ")
        cells = [f"`{field.findtext('name')}`", f"`{type_of(field)}`"]
        cells += [f"`{default}`" if default else "", text_of(field).replace("\n", " ")]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def enumerators(enum: Element) -> str:
    rows = ["| name | what it is |", "|---|---|"]
    for value in enum.iter("enumvalue"):
        name = f"{value.findtext('name')} {initializer(value)}".strip()
        rows.append(f"| `{name}` | {text_of(value)} |")
    return "\n".join(rows)


def heading(level: int, anchor: str, title: str) -> str:
    anchor = re.sub(r"\W+", "-", anchor)
    return f"{'#' * level} {escaped(title)} {{ #{anchor} }}"


def code(text: str) -> str:
    return f"```cpp\n{text}\n```"


def declaration(member: Element) -> str:
    """A declaration as it is written, with one argument a line where it is long."""
    name, kind = member.findtext("name", ""), member.get("kind")
    if kind == "define":
        return f"#define {name} {initializer(member)}".rstrip()
    if kind == "typedef":
        return f"using {name} = {type_of(member)};"
    if kind == "variable":
        return f"{type_of(member)} {name} {initializer(member)}".strip() + ";"
    start = f"{type_of(member)} {name}".strip()
    arguments = tidy(member.findtext("argsstring", ""))
    if len(start + arguments) >= WIDTH and arguments != "()":
        inside, _, after = arguments[1:].rpartition(")")
        lines = ",\n    ".join(split_arguments(inside))
        arguments = f"(\n    {lines}){after}"
    return f"{start}{arguments};"


def split_arguments(text: str) -> list[str]:
    """At the commas that stand in no brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "<({[") - (letter in ">)}]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def type_of(member: Element) -> str:
    return code_in(member.find("type"))


def initializer(member: Element) -> str:
    return code_in(member.find("initializer"))


def code_in(element: Element | None) -> str:
    return "" if element is None else tidy("".join(element.itertext()))


def tidy(text: str) -> str:
    """Doxygen's spaces, as clang-format would have them."""
    text = re.sub(r"< | (?=>)", lambda found: found.group().strip(), text)
    return re.sub(r" ([&*]+)(?=\w|$)", r"\1 ", text).replace("={}", " = {}").strip()


def text_of(element: Element) -> str:
    """The comment of an element; verbatim parts as code."""
    paragraphs = []
    for part in ("briefdescription", "detaileddescription"):
        found = element.find(part)
        for para in found if found is not None else ():
            verbatim = "".join(v.text or "" for v in para.iter("verbatim")).strip("\n")
            words = " ".join("".join(pieces(para)).split())
            paragraphs += [escaped(words)] if words else []
            paragraphs += [code(verbatim)] if verbatim else []
    return "\n\n".join(paragraphs)


def pieces(element: Element) -> Iterator[str]:
    """The text in an element, but for verbatim parts."""
    yield element.text or ""
    for child in element:
        if child.tag != "verbatim":
            yield from pieces(child)
        yield child.tail or ""


def escaped(text: str) -> str:
    """Text in which Markdown sees no emphasis and no HTML; what stands in backticks is kept."""
    parts = re.split(r"(`[^`]*`)", text)
    marked = [part if part.startswith("`") else re.sub(r"([<*])", r"\\\1", part) for part in parts]
    return "".join(marked)
