"""Hypothesis strategies and a slow reference table, for testing code that uses tables.

Needs hypothesis: `pip install recsdk-core[testing]`.
"""

from __future__ import annotations

from recsdk_core._internal.extras import require

require("hypothesis", extra="testing", user="recsdk_core.testing")

from recsdk_core.testing._admission import Admission, AdmissionRecord  # noqa: E402
from recsdk_core.testing._eviction import Eviction, KeyMeta, Seen  # noqa: E402
from recsdk_core.testing._room import Room  # noqa: E402
from recsdk_core.testing.profiles import register_profiles  # noqa: E402
from recsdk_core.testing.reference import (  # noqa: E402
    ReferenceLease,
    ReferenceLeavers,
    ReferenceTable,
)
from recsdk_core.testing.strategies import (  # noqa: E402
    EDGE_KEYS,
    Operation,
    bags,
    key_arrays,
    keys,
    operations,
    predicates,
    vectors,
)

__all__ = [
    "Admission",
    "AdmissionRecord",
    "EDGE_KEYS",
    "Eviction",
    "KeyMeta",
    "Operation",
    "ReferenceLease",
    "ReferenceLeavers",
    "ReferenceTable",
    "Room",
    "Seen",
    "bags",
    "key_arrays",
    "keys",
    "operations",
    "predicates",
    "register_profiles",
    "vectors",
]
