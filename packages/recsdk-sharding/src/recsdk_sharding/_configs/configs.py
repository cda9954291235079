"""What a hash table is: torchrec's table config, without a bound on ids."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from torch import nn
from torchrec.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)

import recsdk_core
from recsdk_core import Admit, Default, Evict, init
from recsdk_core.table import DType, OnFull
from recsdk_core.virtual_shards import NUM_VIRTUAL_SHARDS, default_eviction_groups
from recsdk_sharding._configs.checking import differs, int_of, is_finite, is_one_of, number_of
from recsdk_sharding._configs.data_taken import needed_by, taken_by
from recsdk_sharding._configs.initializers import (
    column_initializer,
    native_initializer,
    per_key_initializer,
)
from recsdk_sharding._configs.upstream import (
    AdmitAndEvictConfig,
    eviction_of_virtual_table,
    rules_of_config,
)

__all__ = [
    "DTYPES",
    "HONOURED_FIELDS",
    "HashEmbeddingBagConfig",
    "HashEmbeddingConfig",
    "HashTableConfig",
    "limit_groups",
]

NonFinite: TypeAlias = Literal["apply", "raise", "skip"]
"""What happens to gradients that are not finite."""

_UINT64 = 2**64

HONOURED_FIELDS = frozenset(
    {
        "num_embeddings",
        "embedding_dim",
        "name",
        "data_type",
        "feature_names",
        "weight_init_max",
        "weight_init_min",
        "init_fn",
        "pooling",
        "virtual_table_eviction_policy",
    }
)
"""Fields of torchrec's configs that hash tables honour; others must be at their defaults."""


DTYPES: dict[DataType, DType] = {
    DataType.FP32: "float32",
    DataType.BF16: "bfloat16",
    DataType.FP16: "float16",
}
"""The engine's names of the types in which rows are stored."""


def limit_groups(of_rows: int | None, admission: Admit | None) -> int | None:
    """Groups of ids that limits of a table divide over; `of_rows`: those of `max_rows`, if any."""
    if admission is None or of_rows is not None:
        return of_rows
    if admission.max_bytes is not None:
        return NUM_VIRTUAL_SHARDS  # a sketch each
    most = admission.max_records
    return None if most is None else default_eviction_groups(most)


@dataclass
class _Settings:
    """The fields that both configs of hash tables have beside torchrec's."""

    seed: int = 0
    """Drives the values of new rows, with the table's name; 0 to 2**64 - 1."""
    max_rows: int | None = None
    """Rows of the whole table, over all ranks; `on_full` says what becomes of further ids. None: no
    limit."""
    eviction_groups: int | None = None
    """Groups of ids that `max_rows` divides over, a power of two; a rank has whole groups. None: as
    many as leave each 4,096 rows, but no fewer than 64 where that leaves 16, at most 65,536."""
    eviction: Evict | None = None
    """Which ids leave when others need their room, which takes `max_rows`, and which expire. None:
    none. What comes with ids for it, such as times, is in a `KeyedJaggedTensorWithData`. On a
    device a table has spare rows for batches in flight, and without `max_rows` ids leave for others
    once as many have a row as `num_embeddings` planned."""
    admission: Admit | None = None
    """Which new ids get a row: by how often all ranks' batches brought them, or by chance. Others
    are NOT_ADMITTED: they read `default`. None: all ids."""
    default: Default = Default()
    """What ids without a row read: refused ones, those not admitted, and in evaluation those that
    were never seen. The tables of a collection may differ in it."""
    admit_and_evict_config: AdmitAndEvictConfig | None = None
    """Rec SDK's settings of who gets a row and who loses it, which become `admission`, `eviction`
    and `default`. None: nothing."""
    on_full: OnFull = "refuse"
    """What happens to ids that find no row free, because of `max_rows` or, on a device, of its
    memory: they are refused and read `default` ("refuse"), or the step raises CapacityError on the
    rank that is full, and PeerError on the others, before anything is trained ("raise")."""
    accumulate_steps: int = 1
    """Backwards whose gradients are added up and applied as one optimizer update, which advances
    the update count by one. The rows that these batches make are seen by readers after it."""
    initializer: init.Initializer | None = None
    """How new rows get their values; None: by `init_fn`."""
    on_nonfinite: NonFinite = "apply"
    """What happens to a row's summed gradient that is infinite or not a number: it is applied, as
    torch does ("apply"), the backward raises NonFiniteError before that table changes ("raise",
    which on a device waits for it), or that row is left as it is ("skip"). Counted in `stats()`."""


class HashTableConfig(_Settings):
    """What both configs of hash tables check and make."""

    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: list[str]
    data_type: DataType
    init_fn: Any
    virtual_table_eviction_policy: Any

    if TYPE_CHECKING:

        def get_weight_init_min(self) -> float: ...

        def get_weight_init_max(self) -> float: ...

    def __post_init__(self) -> None:
        self._check_names()
        self._take_rules()
        self._check_numbers()
        self._check_kinds()
        super().__post_init__()  # type: ignore[misc]

    def _error(self, text: str) -> str:
        return f"table {self.name!r}: {text}"

    def _take_rules(self) -> None:
        """Takes what others' settings ask for as rules of ours."""
        try:
            of_config = rules_of_config(self.admit_and_evict_config)
            of_policy = eviction_of_virtual_table(self.virtual_table_eviction_policy)
        except (TypeError, ValueError) as error:
            raise type(error)(self._error(str(error))) from None
        self._take_rule("admission", of_config.admission, "admit_and_evict_config")
        self._take_rule("default", of_config.default, "admit_and_evict_config")
        self._take_rule("eviction", of_config.eviction, "admit_and_evict_config")
        self._take_rule("eviction", of_policy, "virtual_table_eviction_policy")

    def _take_rule(self, field: str, rule: Admit | Default | Evict | None, asked_by: str) -> None:
        own = getattr(self, field)
        if rule is None or own == rule:
            return
        if own not in (None, Default()):
            raise ValueError(
                self._error(f"{asked_by} asks for {field}={rule}, and it is {own}; leave one out")
            )
        setattr(self, field, rule)

    def _check_names(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(
                f"name of a table must be a string that is not empty, got {self.name!r}"
            )
        if "." in self.name or hasattr(nn.ModuleDict, self.name):
            raise ValueError(
                self._error(
                    "a module cannot have this name; choose one without a dot that is no "
                    "method of torch.nn.ModuleDict"
                )
            )
        names = self.feature_names
        if not isinstance(names, list | tuple) or not all(isinstance(n, str) and n for n in names):
            raise TypeError(
                self._error(
                    f"feature_names must be a list of strings that are not empty, got {names!r}"
                )
            )
        counts: Counter[str] = Counter(names)
        repeated = [name for name, count in counts.items() if count > 1]
        if repeated:
            raise ValueError(self._error(f"feature_names names {repeated} more than once"))

    def _check_numbers(self) -> None:
        self._take_int("num_embeddings", 1)
        self._take_int("embedding_dim", 1)
        self._take_int("seed", 0)
        self._take_int("accumulate_steps", 1)
        if self.seed >= _UINT64:
            raise ValueError(self._error(f"seed must be below 2**64, got {self.seed}"))
        self._check_room()
        self._check_ends()

    def _check_ends(self) -> None:
        for field in ("weight_init_min", "weight_init_max"):
            value = getattr(self, field)
            if value is not None:
                setattr(self, field, number_of(self._error(field), value))
        low, high = self.get_weight_init_min(), self.get_weight_init_max()
        for field, value in (("weight_init_min", low), ("weight_init_max", high)):
            if not is_finite(value):
                raise ValueError(self._error(f"{field} must be a finite number, got {value!r}"))
        if low > high:
            raise ValueError(
                self._error(
                    f"weight_init_min must be at most weight_init_max, got {low} and {high}"
                )
            )

    def _check_room(self) -> None:
        if self.max_rows is not None:
            self._take_int("max_rows", 0)
        elif self.eviction_groups is not None:
            raise ValueError(self._error("eviction_groups divides max_rows; set max_rows too"))
        if self.eviction_groups is not None:
            self._check_groups(self.eviction_groups)
        self._check_admission()
        if not isinstance(self.default, Default):
            text = f"default must be a Default, as Default.constant(0.5), got {self.default!r}"
            raise TypeError(self._error(text))
        if self.eviction is not None:
            self._check_eviction(self.eviction)

    def _check_groups(self, groups: int) -> None:
        self._take_int("eviction_groups", 1)
        most = min(max(self.max_rows or 0, 1), NUM_VIRTUAL_SHARDS)
        if groups & (groups - 1) or groups > most:
            raise ValueError(
                self._error(
                    "eviction_groups must be a power of two up to max_rows, "
                    f"{self.max_rows}, and 65536, got {groups}"
                )
            )

    def _check_eviction(self, eviction: Evict) -> None:
        if not isinstance(eviction, Evict):
            raise TypeError(
                self._error(f"eviction must be an Evict, as Evict.lru(), got {eviction!r}")
            )
        if eviction.order == "low_norm" and self.accumulate_steps > 1:
            raise ValueError(
                self._error(
                    f"accumulate_steps={self.accumulate_steps} trains rows once in several "
                    "batches, and Evict.low_norm() looks at norms between any two; leave one out"
                )
            )
        if self.max_rows is None and eviction.share is not None:
            raise ValueError(
                self._error(
                    "a share of eviction is of each group of ids that max_rows has; set max_rows "
                    "too"
                )
            )
        if self.max_rows is None and not eviction.expires:
            raise ValueError(
                self._error(
                    "eviction makes room in max_rows; set max_rows too, or let ids expire, as in "
                    "Evict.lru().expiring(ttl=...)"
                )
            )

    def _check_admission(self) -> None:
        if self.admission is None:
            return
        if not isinstance(self.admission, Admit):
            raise TypeError(
                self._error(
                    f"admission must be an Admit, as Admit.count(3), got {self.admission!r}"
                )
            )
        most, groups = self.admission.max_records, self.num_groups
        if most is not None and groups is not None and most < groups:
            raise ValueError(
                self._error(
                    f"max_records of admission is {most}, and ids fall into {groups} groups; pass "
                    f"{groups} or more, or set eviction_groups to a power of two up to {most}, but "
                    "no fewer than ranks that the table's rows are cut over"
                )
            )

    def _take_int(self, field: str, lowest: int) -> None:
        value = int_of(self._error(field), getattr(self, field))
        if value < lowest:
            raise ValueError(self._error(f"{field} must be at least {lowest}, got {value}"))
        setattr(self, field, value)

    def _check_kinds(self) -> None:
        if not isinstance(self.data_type, DataType) or self.data_type not in DTYPES:
            raise ValueError(
                self._error(f"data_type must be DataType.FP32, BF16 or FP16, got {self.data_type}")
            )
        for field in fields(EmbeddingBagConfig):
            if field.name not in HONOURED_FIELDS and differs(
                getattr(self, field.name), field.default
            ):
                raise ValueError(
                    self._error(
                        f"{field.name} is not supported by hash tables; leave it at "
                        f"{field.default!r}"
                    )
                )
        if self.initializer is not None and not isinstance(self.initializer, init.Initializer):
            raise TypeError(
                self._error(
                    "initializer must be one of recsdk_core.init, got "
                    f"{self.initializer!r}; pass a function of a tensor as init_fn"
                )
            )
        if not is_one_of(self.on_nonfinite, get_args(NonFinite)):
            raise ValueError(
                self._error(
                    f"on_nonfinite must be one of {get_args(NonFinite)}, got {self.on_nonfinite!r}"
                )
            )
        if not is_one_of(self.on_full, get_args(OnFull)):
            raise ValueError(
                self._error(f"on_full must be one of {get_args(OnFull)}, got {self.on_full!r}")
            )
        if self.init_fn is not None and not callable(self.init_fn):
            raise TypeError(self._error(f"init_fn must be callable, got {self.init_fn!r}"))

    @property
    def dtype(self) -> DType:
        """How the engine stores weights."""
        return DTYPES[self.data_type]

    def row_initializer(self) -> init.Initializer:
        """The engine's initializer of new rows."""
        if self.initializer is not None:
            return self.initializer
        native = native_initializer(self.init_fn)
        return native or per_key_initializer(self.init_fn, self.seed, self.name)

    def initializer_of(self, columns: tuple[int, int]) -> init.Initializer:
        """Makes those columns of the whole table's initial rows."""
        whole, dim = self.row_initializer(), self.embedding_dim
        if columns == (0, dim):
            return whole
        return column_initializer(whole, self.seed, self.name, dim, columns)

    @property
    def _row_groups(self) -> int | None:
        if self.max_rows is None:
            return None
        return self.eviction_groups or default_eviction_groups(self.max_rows)

    @property
    def num_groups(self) -> int | None:
        """Groups of ids that limits divide over, so that ranks have whole ones; None: no limit."""
        return limit_groups(self._row_groups, self.admission)

    @property
    def record_groups(self) -> int | None:
        """Those that `max_records` of admission divides over; None: it is not set."""
        most = None if self.admission is None else self.admission.max_records
        return None if most is None else self._row_groups or default_eviction_groups(most)

    @property
    def data_taken(self) -> tuple[str, ...]:
        """What the table's rules take of what comes with ids, by name of `KeyData`."""
        return taken_by(self.eviction, self.admission)

    @property
    def data_needed(self) -> dict[str, str]:
        """What ids must bring in training, and the rule that needs it."""
        return needed_by(self.eviction, self.admission)

    @property
    def num_cuts(self) -> int | None:
        """Groups of ids of which ranks have whole ones, by limits and shared rows; None: no matter.

        Both are powers of two, so the fewer are unions of the others. Shared rows of another number
        lie on one rank.
        """
        shared = self.default.n
        if shared is not None and shared & (shared - 1):
            return 1
        counts = [count for count in (self.num_groups, shared) if count is not None]
        return min(counts, default=None)

    @property
    def counting_rule(self) -> str | None:
        """The rule that needs to see every occurrence of an id, in its words; None: none does."""
        if self.admission is not None:
            return "admission"
        if self.eviction is None:
            return None
        if self.eviction.takes_clicks or self.eviction.order == "lfu":
            return f"Evict.{self.eviction.order}()"
        if "count" in self.eviction.columns:
            return "Evict.function() of count"
        return None if self.eviction.rare_count is None else "rare_count"

    def make_table(
        self,
        optimizer: recsdk_core.optim.Optimizer,
        owned_groups: tuple[int, int] | None,
        columns: tuple[int, int],
        **limits: Any,
    ) -> recsdk_core.Table:
        """An empty table for a shard: some of the columns, and its rank's groups; None: all.

        `limits`: `max_rows`, `eviction_groups` and `admission`, if not those of the config.
        """
        limits = {
            "max_rows": self.max_rows,
            "eviction_groups": self.eviction_groups,
            "admission": self.admission,
            **limits,
        }
        return recsdk_core.Table(
            columns[1] - columns[0],
            name=self.name,
            optimizer=optimizer,
            initializer=self.initializer_of(columns),
            seed=self.seed,
            **limits,
            owned_groups=None if limits["max_rows"] is None else owned_groups,
            on_full=self.on_full,
            eviction=self.eviction,
            default=self.default,
            on_nonfinite=self.on_nonfinite,
            dtype=self.dtype,
        )


@dataclass
class HashEmbeddingBagConfig(HashTableConfig, EmbeddingBagConfig):  # type: ignore[misc]
    """One table of a `HashEmbeddingBagCollection`: torchrec's `EmbeddingBagConfig` for raw ids.

    `num_embeddings` is the planned number of rows: the planner and the default initializer use it.
    It limits nothing: any number of distinct 64-bit ids may get a row, up to `max_rows`. Beyond
    that ids are refused, or with `eviction` others leave, the same on any number of ranks. Empty
    `feature_names` mean one feature named as the table. `data_type` is how rows are stored: FP32,
    BF16 or FP16. Updates round rows of 16 bits stochastically; optimizer state, results and
    gradients are float32 in any case.

    `initializer` makes new rows, else `init_fn`; without both they are uniform over
    [`weight_init_min`, `weight_init_max`], by default +-1/sqrt(num_embeddings) as in torchrec. The
    `init_fn`s uniform_, normal_, trunc_normal_, constant_, zeros_ and ones_ of `torch.nn.init`, or
    a `partial` of them with keywords, run in the engine. Any other is run per new key on a (1, D)
    tensor, with torch's random numbers seeded by (seed, table, key): slow, but as pure.

    `pooling` NONE is for a `HashEmbeddingCollection`, which takes such configs; a
    `HashEmbeddingBagCollection` pools by SUM or MEAN. Leave all other fields of torchrec's at their
    defaults.

    Raises ValueError or TypeError, naming table and field, for what is out of range or unsupported.

    >>> config = HashEmbeddingBagConfig(
    ...     name="user", embedding_dim=16, num_embeddings=1_000_000, feature_names=["user_id"]
    ... )
    >>> config.row_initializer()
    Uniform(low=-0.001, high=0.001)
    """

    def _check_kinds(self) -> None:
        super()._check_kinds()
        if not isinstance(self.pooling, PoolingType):
            raise ValueError(
                self._error(f"pooling must be PoolingType.SUM, MEAN or NONE, got {self.pooling!r}")
            )


@dataclass
class HashEmbeddingConfig(HashTableConfig, EmbeddingConfig):  # type: ignore[misc]
    """One table of a `HashEmbeddingCollection`: torchrec's `EmbeddingConfig` for raw ids.

    All else as in `HashEmbeddingBagConfig`.

    >>> config = HashEmbeddingConfig(
    ...     name="item", embedding_dim=16, num_embeddings=1_000_000, feature_names=["history"]
    ... )
    """
