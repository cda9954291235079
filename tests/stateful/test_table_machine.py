"""Table against ReferenceTable, one operation after the other, with invariants after each."""

from __future__ import annotations

from hypothesis import settings

from table_machine import TableMachine

TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(max_examples=4 * settings().max_examples)
