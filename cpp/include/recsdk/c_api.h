// The C interface of the engine: pure C11, for C programs and for bindings of other languages.
//
// Shape letters: N keys, B bags, D row width, S state width (the sum of a row's state fields).
//
// Names are those of the C++ interface with a prefix: `recsdk::Table::find_or_insert` is
// `recsdk_table_find_or_insert`. What a call means is said in recsdk/table.h, index.h and
// device_table.h; here is what differs in C.
//
// Status. A function that can fail returns an int: RECSDK_OK (0), or one of enum recsdk_status. A
// failed call has changed nothing but spare capacity, writes no handle, and leaves a message for
// this thread; output arrays may have been written in part. recsdk_last_error_message() gives the
// message.
//
// Arguments. A pointer must not be null unless its description says so; an array of length 0 may
// be null. A null pointer, a negative count, one that no array has, or an unknown enum value is
// RECSDK_ERROR_INVALID_ARGUMENT. An optional value has a has_... flag beside it (0: absent, and
// then the value is not read). Three of recsdk_evict_config have none, as 0 is no value of theirs:
// share, churn_steps and below are absent if they are 0. Flags are 0 or not 0. Strings are
// UTF-8, terminated by a zero byte. Arrays belong to the caller and are only used during the call.
// They are aligned for their type. What a call writes lies over none of its other arrays: rows,
// outcomes, and what is written for keys or bags, are RECSDK_ERROR_INVALID_ARGUMENT over what the
// call reads or writes beside, in a call over many tables also where that is another's.
//
// Structs that begin with `struct_size` may grow: set it to sizeof the struct before any call that
// takes the struct, the _init functions included. Fields that the program's header does not have
// take their defaults, and are not written.
//
// Thread safety: every function may be called from any thread, also on one handle at the same time,
// with two exceptions. Calls on one recsdk_restore come one after the other. What frees a handle
// comes after all other calls on it: _destroy, recsdk_lease_release, recsdk_index_cut_finish. Fork
// while no other thread is inside a call of a table or an index: else the child finds it locked by
// a thread that it does not have, and waits for ever. A device table is not to be used in a child.
//
// ABI rule. RECSDK_ABI_VERSION rises by one in every release in which a program compiled against
// the header of the release before could misbehave with the library: a function taken away or
// changed in signature or meaning, an enumerator renumbered, a struct changed. It stays when
// something is added: a function, an enumerator, a status code, or a field at the end of a struct
// that begins with struct_size. So a program works with every library that reports the ABI version
// of its header and is at least as new as it:
//
//     if (recsdk_abi_version() != RECSDK_ABI_VERSION) return needs_another_library();
//
// Complete programs: examples/c_minimal.c, and examples/own_rows.c for rows of one's own.
#ifndef RECSDK_C_API_H
#define RECSDK_C_API_H

#include <stddef.h>
#include <stdint.h>

#include "recsdk/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/// Version of this binary interface; see the rule above.
#define RECSDK_ABI_VERSION 1

/// The codes of functions that return int; equal to recsdk::ErrorCode.
enum recsdk_status {
  RECSDK_OK = 0,
  RECSDK_ERROR_INVALID_ARGUMENT = 1,     ///< a mistake of the caller
  RECSDK_ERROR_OUT_OF_MEMORY = 2,        ///< the operating system gave no memory
  RECSDK_ERROR_CAPACITY = 3,             ///< a fixed limit was reached
  RECSDK_ERROR_BUSY = 4,                 ///< not now: a batch, lease, cut or callback is under way
  RECSDK_ERROR_NON_FINITE = 5,           ///< a gradient was not finite and the table raises on that
  RECSDK_ERROR_BACKEND_UNAVAILABLE = 6,  ///< the backend is not there
  RECSDK_ERROR_INTERNAL = 7,             ///< a broken invariant or a failing callback
  RECSDK_ERROR_CHECKPOINT = 8,  ///< a checkpoint is damaged, does not fit, or cannot be written
  RECSDK_ERROR_DEVICE = 9,      ///< a call of a device's runtime failed
};

/// What became of one key of one call; outcome arrays hold these as uint8_t. Equal to
/// recsdk::Outcome.
enum recsdk_outcome {
  RECSDK_OUTCOME_FOUND = 0,     ///< the key had a row
  RECSDK_OUTCOME_INSERTED = 1,  ///< the call gave the key a row
  RECSDK_OUTCOME_REFUSED = 2,   ///< the key has no row and found no room, see max_rows and on_full
  RECSDK_OUTCOME_MISSING = 3,   ///< the key has no row and the call does not insert
  RECSDK_OUTCOME_OVERFLOWED = 4,    ///< a device cache could not hold it; nothing gives it yet
  RECSDK_OUTCOME_NOT_ADMITTED = 5,  ///< the key has no row yet: the rule of admission kept it out
};

/// Number of outcomes.
#define RECSDK_NUM_OUTCOMES 6

/// How the rows of one bag become one vector. Equal to recsdk::Pooling.
enum recsdk_pooling {
  RECSDK_POOLING_SUM = 0,  ///< sum of the rows, each times its weight if there are weights
  RECSDK_POOLING_MEAN =
      1,  ///< the sum over the number of keys of the bag, or over the sum of the weights
};

/// Formulas: recsdk/optimizer.h.
enum recsdk_optimizer_kind {
  RECSDK_OPTIMIZER_SGD = 0,
  RECSDK_OPTIMIZER_ADAGRAD = 1,
  RECSDK_OPTIMIZER_ROWWISE_ADAGRAD = 2,
  RECSDK_OPTIMIZER_ADAM = 3,  ///< AdamW: with decoupled weight decay
  RECSDK_OPTIMIZER_PARTIAL_ROWWISE_ADAM = 4,
  RECSDK_OPTIMIZER_LAMB = 5,
  RECSDK_OPTIMIZER_FTRL = 6,
  RECSDK_OPTIMIZER_RMSPROP = 7,
};

/// How weights decay.
enum recsdk_weight_decay {
  RECSDK_WEIGHT_DECAY_L2 = 0,         ///< weight_decay * w is added to the gradient
  RECSDK_WEIGHT_DECAY_DECOUPLED = 1,  ///< w is multiplied by 1 - lr * weight_decay
};

/// Whose update count corrects the bias of Adam, partial rowwise Adam and LAMB.
enum recsdk_bias_correction {
  RECSDK_BIAS_CORRECTION_TABLE =
      0,  ///< the table's count, advanced by every update, an empty one too
  RECSDK_BIAS_CORRECTION_ROW = 1,  ///< a count kept per row
};

/// How a new row gets its first values.
enum recsdk_initializer_kind {
  RECSDK_INITIALIZER_CONSTANT = 0,          ///< every column is `value`
  RECSDK_INITIALIZER_UNIFORM = 1,           ///< uniform over [low, high)
  RECSDK_INITIALIZER_NORMAL = 2,            ///< normal with `mean` and `stddev`
  RECSDK_INITIALIZER_TRUNCATED_NORMAL = 3,  ///< normal, drawn again until within [low, high]
  RECSDK_INITIALIZER_CUSTOM = 4,            ///< `callback` makes the rows
};

/// What happens to a summed gradient that is infinite or not a number.
enum recsdk_nonfinite {
  RECSDK_NONFINITE_APPLY = 0,  ///< applied as torch does, and counted
  RECSDK_NONFINITE_RAISE = 1,  ///< the update fails before it changes anything
  RECSDK_NONFINITE_SKIP = 2,   ///< the key's update is left out, and counted
};

/// What happens to a call that would need more than `max_rows` rows.
enum recsdk_on_full {
  RECSDK_ON_FULL_REFUSE = 0,  ///< the keys that find no room are refused, see recsdk::OnFull
  RECSDK_ON_FULL_RAISE = 1,   ///< the call fails with RECSDK_ERROR_CAPACITY and changes nothing
};

/// How an update makes 16-bit weights from what it computes in float32.
enum recsdk_rounding {
  RECSDK_ROUNDING_STOCHASTIC = 0,  ///< to either neighbour, the nearer the likelier
  RECSDK_ROUNDING_NEAREST = 1,     ///< to the nearest, ties to even
};

/// Element types of a row's fields.
enum recsdk_dtype {
  RECSDK_DTYPE_FLOAT32 = 0,
  RECSDK_DTYPE_BFLOAT16 = 1,  ///< the upper half of a float32
  RECSDK_DTYPE_FLOAT16 = 2,   ///< IEEE 754's binary16
};

/// Where a field of a row lies.
enum recsdk_field_place {
  RECSDK_FIELD_RECORD = 0,   ///< in the row's record
  RECSDK_FIELD_SCALARS = 1,  ///< among the row's scalars, which lie beside the records
};

/// A table: one key space, from a raw 64-bit key to a row of D floats and its optimizer state.
typedef struct recsdk_table recsdk_table;

/// A batch in flight, see recsdk::Lease.
typedef struct recsdk_lease recsdk_lease;

/// Makes the first values of rows: writes num_keys * dim floats to values (N, D), row after row,
/// for keys (N,). It must be a pure function of each key. Any result but 0 fails the inserting call
/// with RECSDK_ERROR_INTERNAL, and the table is unchanged. It runs under the table's lock and must
/// not call the table; it may run on any thread, and for several tables at the same time.
typedef int (*recsdk_row_callback)(void* user_data, const int64_t* keys, int64_t num_keys,
                                   int64_t dim, float* values);

/// An initializer. Fields that the kind does not name are not read.
typedef struct recsdk_initializer_config {
  size_t struct_size;
  int32_t kind;                  ///< enum recsdk_initializer_kind; default constant
  float value;                   ///< constant; default 0
  float low;                     ///< uniform, truncated normal; default 0
  float high;                    ///< uniform, truncated normal; default 0
  float mean;                    ///< normal, truncated normal; default 0
  float stddev;                  ///< normal, truncated normal; default 1
  recsdk_row_callback callback;  ///< custom
  void* user_data;  ///< custom: handed to the callback, may be null; must live as long as the table
                    ///< and its leases
} recsdk_initializer_config;

/// An optimizer; the defaults are those of the torch class of its kind, of partial rowwise Adam and
/// LAMB fbgemm's, of FTRL TensorFlow's.
typedef struct recsdk_optimizer_config {
  size_t struct_size;
  int32_t kind;                     ///< enum recsdk_optimizer_kind
  float learning_rate;              ///< default 0.001 (SGD, Adam, FTRL) or 0.01 (all others)
  double beta1;                     ///< Adam and its kin; default 0.9
  double beta2;                     ///< Adam and its kin; default 0.999
  float eps;                        ///< default 1e-10, 1e-8 for Adam and its kin, and RMSprop
  float weight_decay;               ///< on touched rows; default 0
  float lr_decay;                   ///< Adagrad; default 0
  float initial_accumulator_value;  ///< Adagrad, rowwise Adagrad; default 0. FTRL; default 0.1
  int32_t bias_correction;    ///< Adam and its kin: enum recsdk_bias_correction; default table
  int32_t weight_decay_mode;  ///< enum recsdk_weight_decay; default L2, decoupled for partial
                              ///< rowwise Adam
  double dampening;           ///< SGD with momentum; default 0
  double alpha;               ///< RMSprop; default 0.99
  float momentum;             ///< SGD, RMSprop; default 0
  float l1;                   ///< FTRL; default 0
  float l2;                   ///< FTRL; default 0
  float beta;                 ///< FTRL; default 0
  float clip_value;           ///< limit of each element of a summed gradient; default absent
  float clip_norm;            ///< limit of the norm of a row's summed gradient; default absent
  int32_t has_clip_value;
  int32_t has_clip_norm;
  int32_t nesterov;  ///< SGD with momentum: flag; default 0
  int32_t centered;  ///< RMSprop: flag; default 0
  int32_t catch_up;  ///< flag: decay for the updates that left a row out; default 0
  int32_t reserved;  ///< must be 0
} recsdk_optimizer_config;

/// What a key's place in the order of eviction follows from. Equal to recsdk::EvictOrder.
enum recsdk_evict_order {
  RECSDK_EVICT_LRU = 0,    ///< when it was last seen
  RECSDK_EVICT_LFU = 1,    ///< how often it was seen
  RECSDK_EVICT_SCORE = 2,  ///< the score that the caller gave it last
  /// alpha times how often it was shown, and beta times its clicks, with decay
  RECSDK_EVICT_SHOW_CLICK = 3,
  RECSDK_EVICT_LOW_NORM = 4,  ///< the norm of its row at the latest look; of tables
  RECSDK_EVICT_FUNCTION = 5,  ///< what a function of the caller's made of it at the latest look
  /// as SHOW_CLICK, all shows and clicks so far added anew, and decayed, by each step that sees it
  RECSDK_EVICT_SHOW_CLICK_TOTALS = 6,
};

/// What a rule of eviction takes for the time. Equal to recsdk::EvictClock.
enum recsdk_evict_clock {
  RECSDK_EVICT_BY_STEP = 0,
  RECSDK_EVICT_BY_TIME = 1,  ///< the times that come with keys; of LRU and FUNCTION
};

/// What keys without a row read. Equal to recsdk::DefaultKind.
enum recsdk_default_kind {
  RECSDK_DEFAULT_CONSTANT = 0,     ///< one value in each column; no gradient is kept
  RECSDK_DEFAULT_INITIAL_ROW = 1,  ///< the row that the key would begin with, which is not kept
  RECSDK_DEFAULT_SHARED_ROWS = 2,  ///< one of some rows that learn from all keys that read them
};

/// How a row begins whose key read a shared one before. Equal to recsdk::BeginWith.
enum recsdk_begin_with {
  RECSDK_BEGIN_WITH_INITIAL_ROW = 0,  ///< as in other tables
  RECSDK_BEGIN_WITH_SHARED_ROW = 1,   ///< with the weights that its shared row then has
};

/// What keys without a row read: those that are refused, not admitted, or looked up and not there.
/// Fields that the kind does not name are not read. See recsdk::DefaultConfig.
typedef struct recsdk_default_config {
  size_t struct_size;
  int32_t kind;        ///< enum recsdk_default_kind; default constant
  float value;         ///< of CONSTANT: finite; default 0
  int64_t num_rows;    ///< of SHARED_ROWS: 1 to 65,536; default 1
  int32_t begin_with;  ///< of SHARED_ROWS: enum recsdk_begin_with; default the initial row
  int32_t reserved;    ///< must be 0
} recsdk_default_config;

/// What is kept of keys (num_keys,); null: what the config does not ask for. See
/// recsdk::EvictColumns.
typedef struct recsdk_evict_columns {
  int64_t now;
  int64_t num_keys;
  const int64_t* steps;
  const int64_t* times;
  const int64_t* counts;
  const float* scores;
} recsdk_evict_columns;

/// Writes where keys stand (num_keys,), numbers that are finite as float; the lowest leaves first.
/// It must follow from a key's columns and `now` alone: most keys with equal columns are shown
/// once, some again. Any result but 0 fails the call with RECSDK_ERROR_INTERNAL, and nothing has
/// changed. It runs under the table's lock, on any thread, and must not call the table.
typedef int (*recsdk_evict_function)(void* user_data, const recsdk_evict_columns* columns,
                                     double* places);

/// Which keys leave when others find no room; see recsdk::EvictConfig.
typedef struct recsdk_evict_config {
  size_t struct_size;
  int32_t order;     ///< enum recsdk_evict_order; default LRU
  int32_t clock;     ///< enum recsdk_evict_clock; default by step
  double half_life;  ///< of LFU: steps, > 0; default absent: all occurrences count alike for ever
  int64_t min_age;   ///< steps, >= 0, that a key stays at least; default 0
  int32_t has_half_life;
  int32_t ignores_now;  ///< of FUNCTION: flag: it follows from columns alone; default 0
  int64_t ttl;          ///< steps or time, >= 1, after which a key not seen expires; default absent
  int64_t rare_ttl;     ///< the same of keys seen less than rare_count times; default absent
  int64_t rare_count;   ///< >= 2
  int64_t expire_every;  ///< steps, >= 1, between two looks for keys that expired; default 100
  int32_t has_ttl;
  int32_t has_rare_ttl;
  double alpha;         ///< of SHOW_CLICK, TOTALS too: 0, or 2**-16 to 2**20; default 1
  double beta;          ///< of them: the same, not both 0; default 0
  double decay;         ///< of them: what a step leaves, above 0, up to 1; default 1
  double share;         ///< part of each group's keys, 0 to 1, that leaves at each look; default 0
  int64_t churn_steps;  ///< within which keys that left count as returned; default 0: none do
  int64_t churn_records;  ///< keys that left and are remembered, >= 1; default 2**20
  double below;           ///< of LOW_NORM: keys of a norm below leave at looks; default 0: none
  recsdk_evict_function function;  ///< of FUNCTION, which needs it; default null
  void* function_data;             ///< what it is given; must live as long as the table
  int32_t keeps_counts;            ///< of FUNCTION: flag; default 0
  int32_t keeps_scores;            ///< of FUNCTION: flag; default 0
} recsdk_evict_config;

/// What a term of a rule of admission asks for. Equal to recsdk::AdmitTerm::Kind.
enum recsdk_admit_kind {
  RECSDK_ADMIT_COUNT = 0,               ///< that the key has been seen `count` times
  RECSDK_ADMIT_PROBABILITY = 1,         ///< a draw with `probability`, each time that it is seen
  RECSDK_ADMIT_ALL = 2,                 ///< both of the two terms before it
  RECSDK_ADMIT_ANY = 3,                 ///< one of the two terms before it, or both
  RECSDK_ADMIT_SHOW_CLICK = 4,          ///< that alpha * shows + beta * clicks reach `threshold`
  RECSDK_ADMIT_COUNT_SKETCH = 5,        ///< as COUNT, or seldom earlier, by counters of max_bytes
  RECSDK_ADMIT_SHOW_CLICK_OF_STEP = 6,  ///< as SHOW_CLICK, by what one step brings; keeps nothing
};

/// One term of a rule of admission; see recsdk::AdmitTerm. What its kind does not use may be 0.
typedef struct recsdk_admit_term {
  int32_t kind;        ///< enum recsdk_admit_kind
  int32_t reserved;    ///< must be 0
  int64_t count;       ///< of COUNT 1 to 2**31 - 1, of COUNT_SKETCH to 2**15 - 1
  double probability;  ///< of PROBABILITY: above 0, up to 1
  double alpha;        ///< of SHOW_CLICK, OF_STEP too: finite, 0 or more
  double beta;         ///< of them: the same, not both 0
  double threshold;    ///< of them: finite, above 0
} recsdk_admit_term;

/// Which new keys get a row; see recsdk::AdmitConfig.
typedef struct recsdk_admit_config {
  size_t struct_size;
  const recsdk_admit_term* rule;  ///< (num_terms,) in postfix order, copied
  int64_t num_terms;              ///< 1 to 63
  int64_t max_records;  ///< keys whose count is kept, >= 1, of COUNT and SHOW_CLICK; default absent
  int64_t max_bytes;    ///< of the counters of COUNT_SKETCH, which needs it, >= 524,288
  int32_t has_max_records;
  int32_t has_max_bytes;
  uint64_t salt;  ///< of an index: what PROBABILITY draws from; default 0. Tables have their own
} recsdk_admit_config;

/// How often a key without a row was seen, or a word of a sketch; see recsdk::AdmitRecord.
typedef struct recsdk_admit_record {
  int64_t key;
  int64_t count;
  int64_t step;
  int64_t clicks;
} recsdk_admit_record;

/// Where the clock of a table with eviction or admission stands; see recsdk::EvictionState.
typedef struct recsdk_clock {
  size_t struct_size;
  int64_t step;        ///< of the last call that inserted
  int64_t lease_step;  ///< that its lease carried
  int64_t time;        ///< see recsdk::Index::time; not INT64_MIN
  int32_t is_begun;    ///< flag: there was such a call
  int32_t has_lease_step;
  int32_t has_time;
  int32_t reserved;  ///< must be 0
} recsdk_clock;

/// What comes with the keys of a call that inserts, see recsdk::KeyData; all zero: nothing.
typedef struct recsdk_key_data {
  const int64_t* times;   ///< (num_times,), INT64_MIN: unknown; or null: now, or the table's time
  int64_t num_times;      ///< N, or 1: one for all
  const float* scores;    ///< (N,), or null: keys keep their score, new ones have 0
  const int64_t* counts;  ///< (num_counts,), >= 1: occurrences, or null: 1; see recsdk::KeyData
  int64_t num_counts;     ///< N, or 1: one for all
  const int64_t* clicks;  ///< (num_clicks,), >= 0; rules of SHOW_CLICK with beta above 0 need them
  int64_t num_clicks;     ///< N, or 1: one for all
  int64_t now;            ///< with has_now the table's time from this call on; not INT64_MIN
  int32_t has_now;        ///< flag
  int32_t reserved;       ///< must be 0
} recsdk_key_data;

/// Why a key left; arrays of causes hold these as uint8_t. Equal to recsdk::LeaveCause.
enum recsdk_leave_cause {
  RECSDK_LEFT_EVICTED = 0,  ///< for another one, or by recsdk_table_evict
  RECSDK_LEFT_ERASED = 1,   ///< by recsdk_table_erase or recsdk_table_clear
  RECSDK_LEFT_EXPIRED = 2,  ///< since it was not seen for long
};

/// What happens when more rows leave than there are places for. Equal to recsdk::OnOverflow.
enum recsdk_on_overflow {
  RECSDK_OVERFLOW_COUNT = 0,  ///< those that find none are lost, and counted
  /// the call waits until they are read; RECSDK_ERROR_CAPACITY at once where that is not enough
  RECSDK_OVERFLOW_BLOCK = 1,
  RECSDK_OVERFLOW_RAISE = 2,  ///< the call fails with RECSDK_ERROR_CAPACITY and changes nothing
};

/// How rows that left wait to be read; see recsdk::LeaversOptions.
typedef struct recsdk_leavers_options {
  size_t struct_size;
  int64_t max_rows;      ///< places, >= 1; default 65,536
  double block_seconds;  ///< > 0: a call that waits longer fails with RECSDK_ERROR_BUSY; default 60
  int32_t on_overflow;   ///< enum recsdk_on_overflow; default count
  int32_t reserved;      ///< must be 0
} recsdk_leavers_options;

/// Keys that leave a table, or an index, see recsdk::Leavers.
typedef struct recsdk_leavers recsdk_leavers;

/// What a table is made of. Only `dim` has no default.
typedef struct recsdk_table_config {
  size_t struct_size;
  int64_t dim;       ///< D >= 1
  const char* name;  ///< part of the identity of initial rows, not empty; default "table"
  const recsdk_optimizer_config* optimizer;      ///< null, the default: SGD with its defaults
  const recsdk_initializer_config* initializer;  ///< null, the default: rows of zeros
  uint64_t seed;         ///< drives initial rows and nothing else; default 0
  uint64_t hash_seed;    ///< of the index; no result depends on it; default absent: random
  int64_t max_rows;      ///< >= 0, see on_full; default absent: no limit
  int32_t on_nonfinite;  ///< enum recsdk_nonfinite; default apply
  int32_t num_threads;   ///< >= 1, of this table's calls; default absent: the pool's size
  int32_t has_hash_seed;
  int32_t has_max_rows;
  int32_t has_num_threads;
  int32_t weight_dtype;  ///< enum recsdk_dtype, of stored rows; default float32
  int32_t rounding;      ///< enum recsdk_rounding, of updates to 16-bit rows; default stochastic
  int32_t on_full;       ///< enum recsdk_on_full; default refuse
  int32_t has_eviction_groups;
  int32_t has_owned_groups;
  int64_t eviction_groups;  ///< see recsdk::IndexConfig; default absent: follows from max_rows
  int64_t owned_begin;      ///< first of the groups whose keys may come; default absent: all
  int64_t owned_end;        ///< the one after the last
  const recsdk_evict_config* eviction;       ///< null, the default: nobody leaves; see IndexConfig
  const recsdk_admit_config* admission;      ///< null, the default: all new keys get a row
  const recsdk_default_config* default_row;  ///< null, the default: keys without a row read zeros
} recsdk_table_config;

/// Bags of keys that were mapped before.
typedef struct recsdk_bags {
  const int64_t* rows;      ///< (N,) as recsdk_table_map gave them
  const uint8_t* outcomes;  ///< (N,): a key without a row reads the default, gets no gradient
  int64_t num_keys;         ///< N
  const int64_t* offsets;   ///< (B + 1,), ascending from 0 to N; null: each key is a bag
  int64_t num_bags;         ///< B; equal to N where offsets is null
  const float* weights;     ///< (N,), or null: no weights
  int32_t pooling;          ///< enum recsdk_pooling
  int32_t reserved;         ///< must be 0
} recsdk_bags;

/// Where the vectors of some bags go: bag b to out[b * stride], D floats.
typedef struct recsdk_pool_block {
  recsdk_bags bags;
  float* out;
  int64_t stride;  ///< in floats, >= D
} recsdk_pool_block;

/// Where the gradients of some bags come from: of bag b at grad[b * stride], D floats.
typedef struct recsdk_grad_block {
  recsdk_bags bags;
  const float* grad;
  int64_t stride;       ///< in floats; >= D, or 0: all bags share one vector
  float* weights_grad;  ///< (N,), or null: gradient of bags.weights, made before the update
} recsdk_grad_block;

/// One table's part of recsdk_map_tables.
typedef struct recsdk_map_call {
  recsdk_table* table;
  const int64_t* keys;        ///< (N,)
  int64_t num_keys;           ///< N
  const recsdk_lease* lease;  ///< the batch that the call belongs to, or null: visible at once
  int64_t* rows;              ///< (N,), written
  uint8_t* outcomes;          ///< (N,), written
  int32_t insert;             ///< flag: give unseen keys a row
  int32_t reserved;           ///< must be 0
} recsdk_map_call;

/// One table's part of recsdk_pool_tables.
typedef struct recsdk_pool_call {
  const recsdk_table* table;
  const recsdk_pool_block* blocks;
  int64_t num_blocks;
} recsdk_pool_call;

/// One table's part of recsdk_update_tables.
typedef struct recsdk_update_call {
  recsdk_table* table;
  const recsdk_grad_block* blocks;
  int64_t num_blocks;
} recsdk_update_call;

/// A row's record, and the scalars beside it: field 0 is "weight", the others are the optimizer's
/// state.
typedef struct recsdk_row_layout {
  size_t struct_size;
  int64_t dim;          ///< D
  int64_t stride;       ///< bytes of a record, a multiple of 16
  int64_t state_width;  ///< S
  int64_t num_fields;
  int64_t scalar_stride;  ///< bytes of what a row has beside its record, a multiple of 4
} recsdk_row_layout;

/// One field of a row.
typedef struct recsdk_row_field {
  size_t struct_size;
  const char* name;     ///< "weight", or of state "sum", "exp_avg", ...; lives as long as the table
  int64_t offset;       ///< bytes from the start of the record or of the row's scalars
  int64_t count;        ///< elements that mean something: D, or 1 or 2 among scalars
  float initial_value;  ///< of a new row (not used for "weight")
  int32_t dtype;        ///< enum recsdk_dtype
  int32_t place;        ///< enum recsdk_field_place
  int32_t reserved;     ///< 0
} recsdk_row_field;

/// Cumulative counts of keys by outcome, and a few sizes; see recsdk::TableStats.
typedef struct recsdk_stats {
  size_t struct_size;
  int64_t num_rows;            ///< keys visible to readers
  int64_t num_rows_in_flight;  ///< keys inserted by batches in flight: readers do not see them
  uint64_t outcomes[RECSDK_NUM_OUTCOMES];  ///< keys by enum recsdk_outcome, over all calls
  uint64_t erased;                         ///< keys taken out by erase and clear
  uint64_t updates;                        ///< optimizer updates so far, empty ones included
  uint64_t nonfinite;                      ///< rows whose summed gradient was not finite
  int64_t index_bytes;                     ///< memory of the index
  int64_t row_bytes;                       ///< memory of rows that were needed or reserved
  int64_t metadata_bytes;                  ///< memory of what is kept per row beside the record
  int64_t index_slots;                     ///< key slots of the hashed part of the index
  int64_t index_segments;                  ///< its parts, each of which grows by itself
  int64_t index_crowded;                   ///< segments of keys that collide under the hash seed
  int64_t index_directory;                 ///< entries of the directory
  uint64_t index_splits;                   ///< segments split so far
  int64_t index_overflowed;                ///< hashed keys that lie outside their home bucket
  int64_t index_probes;                    ///< buckets read if every hashed key is looked up once
  int64_t index_dense_keys;                ///< keys of dense ranges, which are mapped directly
  int64_t index_dense_pages;               ///< ranges of 2048 keys that are mapped directly
  int64_t tracking_bytes;  ///< memory that tells changes since the last save, or awaits the next
  int64_t checkpoint_copied_bytes;  ///< memory of rows copied for an open cut
  uint64_t checkpoint_waits;        ///< times that an update waited for a cut to be read further
  double checkpoint_wait_seconds;   ///< how long all of them took
  uint64_t evicted;                 ///< keys that left for others, or by recsdk_table_evict
  uint64_t expired;                 ///< keys that left since they were not seen for long
  uint64_t returned;                ///< keys that got a row again within churn_steps of leaving
  uint64_t churn_lost;              ///< keys that were forgotten within churn_steps
  int64_t admission_records;        ///< keys without a row whose count is kept
  uint64_t records_lost;            ///< counts of keys that left for others
  int64_t num_rows_held_back;       ///< in flight, of batches that ended before an earlier one
} recsdk_stats;

/// From raw keys to row numbers, for rows that the caller keeps; see recsdk::Index.
typedef struct recsdk_index recsdk_index;

/// Gives new rows (n,) their initial values, for keys (n,) that a call is about to insert. Any
/// result but 0 fails that call with RECSDK_ERROR_INTERNAL, and the index is unchanged. It runs
/// under the index's lock and must not call the index; it may run on any thread, and for several
/// indexes at the same time.
typedef int (*recsdk_make_rows_callback)(void* user_data, const int64_t* keys, const uint32_t* rows,
                                         int64_t num_rows);

/// What an index is made of; see recsdk::IndexConfig.
typedef struct recsdk_index_config {
  size_t struct_size;
  const char* name;                     ///< for messages, not empty; default "index"
  uint64_t hash_seed;                   ///< no result depends on it; default absent: random
  int64_t max_rows;                     ///< >= 0, see recsdk::IndexConfig; default absent: no limit
  recsdk_make_rows_callback make_rows;  ///< null, the default: outcomes say which rows are new
  void* user_data;      ///< handed to make_rows, may be null; must live as long as the index
  int32_t num_threads;  ///< >= 1, of this index's calls; default absent: the pool's size
  int32_t has_hash_seed;
  int32_t has_max_rows;
  int32_t has_num_threads;
  int32_t on_full;  ///< enum recsdk_on_full; default refuse
  int32_t has_eviction_groups;
  int64_t eviction_groups;  ///< see recsdk::IndexConfig; default absent: follows from max_rows
  int64_t owned_begin;      ///< first of the groups whose keys may come; default absent: all
  int64_t owned_end;        ///< the one after the last
  int32_t has_owned_groups;
  int32_t has_record_groups;
  const recsdk_evict_config* eviction;   ///< null, the default: nobody leaves; see IndexConfig
  const recsdk_admit_config* admission;  ///< null, the default: all new keys get a row
  /// What map says in place of the row number of a key without a row, see recsdk::IndexConfig.
  /// Null, the default: nothing.
  const recsdk_default_config* default_row;
  int64_t record_groups;  ///< see recsdk::IndexConfig; default absent: those of max_rows
} recsdk_index_config;

/// One index's part of recsdk_map_indexes.
typedef struct recsdk_index_map_call {
  recsdk_index* index;
  const int64_t* keys;        ///< (N,)
  int64_t num_keys;           ///< N
  const recsdk_lease* lease;  ///< the batch that the call belongs to, or null: visible at once
  int64_t* rows;              ///< (N,), written
  uint8_t* outcomes;          ///< (N,), written
  int32_t insert;             ///< flag: give unseen keys a row
  int32_t reserved;           ///< must be 0
} recsdk_index_map_call;

/// The keys of an index at one moment, see recsdk::IndexCut.
typedef struct recsdk_index_cut recsdk_index_cut;

/// What a cut holds; the arrays live as long as the cut.
typedef struct recsdk_index_changes {
  size_t struct_size;
  const int64_t* keys;    ///< (n,) that are there; of changes those that came or were noted
  const int64_t* rows;    ///< (n,)
  const int64_t* left;    ///< (m,) that left, ascending; none unless changes_only
  int64_t num_keys;       ///< n
  int64_t num_left;       ///< m
  const uint8_t* causes;  ///< (m,): enum recsdk_leave_cause of each that left
} recsdk_index_changes;

/// A table whose rows lie in a device's memory, see recsdk::DeviceTable.
typedef struct recsdk_device_table recsdk_device_table;

/// Where a device table's rows lie. Only max_device_rows has no default.
typedef struct recsdk_device_options {
  size_t struct_size;
  const char* backend;      ///< "cpu", the host's own memory, or "npu", Ascend's; default "npu"
  int64_t max_device_rows;  ///< >= 1; their memory is taken at once
  int32_t device;           ///< its ordinal; default 0
  int32_t reserved;         ///< must be 0
} recsdk_device_options;

/// Counts of a device table, and memory in bytes; see recsdk::DeviceTableStats.
typedef struct recsdk_device_stats {
  size_t struct_size;
  int64_t num_rows;
  int64_t num_rows_in_flight;
  uint64_t outcomes[RECSDK_NUM_OUTCOMES];
  uint64_t erased;
  uint64_t updates;
  int64_t host_bytes;
  int64_t pinned_bytes;
  int64_t device_bytes;
} recsdk_device_stats;

/// A table's visible rows as they were at one moment, see recsdk::Cut.
typedef struct recsdk_cut recsdk_cut;

/// Row files on their way into a table, see recsdk::Restore.
typedef struct recsdk_restore recsdk_restore;

/// See recsdk::CutOptions. All zero but struct_size: all rows, without a limit.
typedef struct recsdk_cut_options {
  size_t struct_size;
  int64_t max_copy_bytes;  ///< >= 0, of copies of rows that change meanwhile; default absent
  int32_t has_max_copy_bytes;
  int32_t changes_only;  ///< flag: only what changed since the last durable cut or restore
} recsdk_cut_options;

/// What a cut holds, and what it costs.
typedef struct recsdk_cut_info {
  size_t struct_size;
  int64_t num_rows;
  int64_t num_erased;     ///< keys that left; 0 unless changes_only
  uint64_t update_count;  ///< of the table at the cut, as log_decay and learning_rate
  double log_decay;
  int64_t copied_bytes;      ///< of rows copied because they changed: held now
  int64_t max_copied_bytes;  ///< the most held so far
  float learning_rate;
  int32_t changes_only;  ///< flag
  int32_t is_finished;   ///< flag
  int32_t reserved;      ///< 0
} recsdk_cut_info;

/// How the blocks of a row file are compressed.
enum recsdk_codec {
  RECSDK_CODEC_NONE = 0,
  RECSDK_CODEC_ZSTD = 1,  ///< where libzstd is there
};

/// Takes `size` bytes of a file, in order. Any result but 0 fails the call with
/// RECSDK_ERROR_CHECKPOINT. Called by the calling thread.
typedef int (*recsdk_write_callback)(void* user_data, const void* bytes, size_t size);

/// How a cut is written; see recsdk::WriteOptions. recsdk_write_options_init sets no compression
/// and blocks of nearly 4 MiB; a callback or a descriptor is yet to be chosen.
typedef struct recsdk_write_options {
  size_t struct_size;
  const char* name;                ///< of the file, for messages
  recsdk_write_callback callback;  ///< null: to the descriptor
  void* user_data;                 ///< for the callback
  int64_t block_bytes;             ///< 4096 to 12 MiB
  int32_t descriptor;              ///< a file open for writing; the caller syncs and closes it
  int32_t codec;                   ///< enum recsdk_codec
  uint8_t token[16];               ///< the same in all files of one save, and another in each
} recsdk_write_options;

/// Totals of a row file.
typedef struct recsdk_row_file_summary {
  size_t struct_size;
  int64_t num_rows;
  int64_t num_erased;
  int64_t num_bytes;
  char checksum[40];  ///< XXH3-128 of all bytes: 32 hexadecimal digits, then zeros
} recsdk_row_file_summary;

/// The rows that keys without one share; the arrays live as long as the cut.
typedef struct recsdk_shared_rows {
  size_t struct_size;
  const int64_t* keys;   ///< (n,) that stand for them, see recsdk::shared_row_key
  const float* weights;  ///< (n, D)
  const float* state;    ///< (n, S)
  int64_t num_rows;      ///< n
} recsdk_shared_rows;

/// Which keys of a row file are kept; see recsdk::RestoreOptions. All zero but struct_size: all.
typedef struct recsdk_restore_options {
  size_t struct_size;
  const uint8_t* owned;  ///< (65536,) by virtual shard, not 0: keep; or null: all
  int64_t modulo_rank;   ///< keeps keys with (uint64_t)key % modulo_world == modulo_rank
  int64_t modulo_world;
  int32_t has_modulo;
  int32_t drop_state;     ///< flag: weights only, with the state of new rows
  int32_t drop_metadata;  ///< flag: of eviction; keys are as if they had never been seen
  int32_t reserved;       ///< must be 0
} recsdk_restore_options;

// The library and the process.

/// RECSDK_ABI_VERSION of the library.
RECSDK_API uint32_t recsdk_abi_version(void);

/// Version of the library, for example "0.1.0".
RECSDK_API const char* recsdk_version(void);

/// What went wrong in the last call of this thread that failed; "" if none did. Valid until the
/// thread's next failing call; a call that succeeds does not change it. Messages beyond 1023 bytes
/// are cut.
RECSDK_API const char* recsdk_last_error_message(void);

/// Instruction sets that this machine runs, slowest first: *names points to *num_names strings that
/// live as long as the process.
RECSDK_API int recsdk_available_isas(const char* const** names, int64_t* num_names);

/// The instruction set in use; *name lives as long as the process. Invalid argument: the
/// environment variable RECSDK_ISA names one that is not available.
RECSDK_API int recsdk_isa(const char** name);

/// Switches the process to another instruction set; meant for tests, not to be called beside
/// running calls. Results are bit-equal on all of them.
RECSDK_API int recsdk_set_isa(const char* name);

/// Threads of the process-wide pool, the caller's included: RECSDK_NUM_THREADS, else the number of
/// processors that the process may run on. Results do not depend on it.
RECSDK_API int recsdk_num_threads(int32_t* count);

/// Changes the size of the pool (1 to 1024). Running calls go on with the threads they have. After
/// fork the child makes itself a pool of the same size when it needs one.
RECSDK_API int recsdk_set_num_threads(int32_t count);

/// The 64-bit identity of a table's name in its initial values.
RECSDK_API int recsdk_table_hash(const char* name, uint64_t* hash);

// Configurations.

/// Fills the defaults of a kind, enum recsdk_optimizer_kind. `config->struct_size` must be set.
RECSDK_API int recsdk_optimizer_config_init(recsdk_optimizer_config* config, int32_t kind);

/// Fills the defaults: a constant 0. `config->struct_size` must be set.
RECSDK_API int recsdk_initializer_config_init(recsdk_initializer_config* config);

/// Fills the defaults; dim must be set afterwards. `config->struct_size` must be set.
RECSDK_API int recsdk_table_config_init(recsdk_table_config* config);

/// Fills the defaults: zeros. `config->struct_size` must be set.
RECSDK_API int recsdk_default_config_init(recsdk_default_config* config);

/// Fills the defaults: LRU by step. `config->struct_size` must be set.
RECSDK_API int recsdk_evict_config_init(recsdk_evict_config* config);

/// Fills the defaults; the rule must be set afterwards. `config->struct_size` must be set.
RECSDK_API int recsdk_admit_config_init(recsdk_admit_config* config);

/// Fills the defaults. `options->struct_size` must be set.
RECSDK_API int recsdk_leavers_options_init(recsdk_leavers_options* options);

// One table.

/// Makes a table. The configs are copied and may go. Cost: no memory until the first insertion.
RECSDK_API int recsdk_table_create(const recsdk_table_config* config, recsdk_table** table);

/// Frees the handle; null does nothing. Leases keep the table's memory until they are released.
RECSDK_API void recsdk_table_destroy(recsdk_table* table);

/// Describes the records of the table's rows. `layout->struct_size` must be set.
RECSDK_API int recsdk_table_layout(const recsdk_table* table, recsdk_row_layout* layout);

/// Describes field 0 <= index < num_fields of the record. `field->struct_size` must be set.
RECSDK_API int recsdk_table_field(const recsdk_table* table, int64_t index,
                                  recsdk_row_field* field);

/// Opens a batch, with a step if has_step. Steps must not descend from one lease of a table to the
/// next. *lease is to be released with recsdk_lease_release; it may outlive the table.
RECSDK_API int recsdk_table_lease(recsdk_table* table, int has_step, int64_t step,
                                  recsdk_lease** lease);

/// The step of a lease; *step is only written if *has_step.
RECSDK_API int recsdk_lease_step(const recsdk_lease* lease, int* has_step, int64_t* step);

/// Ends the batch and frees the handle; null does nothing.
RECSDK_API void recsdk_lease_release(recsdk_lease* lease);

/// Finds the rows of keys (N,) and, if `insert`, gives a row to each unseen one, in the batch
/// `lease` (or null: visible at once). Writes rows (N,) and outcomes (N,); what is written in place
/// of the row number of a key without a row, recsdk_table_pool and _update take back. Busy:
/// inserting without a step while leases with a step are open.
RECSDK_API int recsdk_table_map(recsdk_table* table, const int64_t* keys, int64_t num_keys,
                                int insert, const recsdk_lease* lease, int64_t* rows,
                                uint8_t* outcomes);

/// Copies the rows of keys (N,) to values (N, D); a key without a row reads the default.
/// outcomes (N,) may be null.
RECSDK_API int recsdk_table_lookup(const recsdk_table* table, const int64_t* keys, int64_t num_keys,
                                   float* values, uint8_t* outcomes);

/// Map with insertion, then lookup. `lease` and outcomes (N,) may be null.
RECSDK_API int recsdk_table_find_or_insert(recsdk_table* table, const int64_t* keys,
                                           int64_t num_keys, const recsdk_lease* lease,
                                           float* values, uint8_t* outcomes);

/// Writes values (N, D) and state (N, S) of keys (N,), inserting unseen ones; of duplicates the
/// last wins. `state` null: fresh state. outcomes (N,) may be null. Busy while leases with a step
/// are open.
RECSDK_API int recsdk_table_upsert(recsdk_table* table, const int64_t* keys, int64_t num_keys,
                                   const float* values, const float* state, uint8_t* outcomes);

/// Takes keys (N,) out; outcomes (N,) may be null. What admission counts of them by key is
/// forgotten, also of those without a row. Busy while leases with a step are open.
RECSDK_API int recsdk_table_erase(recsdk_table* table, const int64_t* keys, int64_t num_keys,
                                  uint8_t* outcomes);

/// Takes every key out, and forgets all that admission has counted. Busy while leases with a step
/// are open.
RECSDK_API int recsdk_table_clear(recsdk_table* table);

/// recsdk_table_map with insertion, with what comes with keys for eviction and admission. `data`
/// may be null.
RECSDK_API int recsdk_table_map_with(recsdk_table* table, const int64_t* keys, int64_t num_keys,
                                     const recsdk_lease* lease, const recsdk_key_data* data,
                                     int64_t* rows, uint8_t* outcomes);

/// Sets the table's time: keys expire by it, and keys that come without one have it; later times of
/// keys move it on. Invalid argument unless eviction goes by time, and for INT64_MIN.
RECSDK_API int recsdk_table_set_time(recsdk_table* table, int64_t time);

/// Makes room: evicts until each group has at most its part of `max_rows`; *num_evicted, which may
/// be null, is how many left. Invalid argument without eviction; busy while leases with a step are
/// open.
RECSDK_API int recsdk_table_evict(recsdk_table* table, int64_t max_rows, int64_t* num_evicted);

/// Sets leaves[i] to 1 for each of the keys (n,) that is to leave; all are 0 before. `words`
/// (n, num_words) are what eviction keeps of each, in this order, where there is such: the step
/// that saw it last; its time; its count in units of 2^-16; its score (a float's bits); its shows
/// and clicks, weighed, in units of 2^-16; its norm, or what the function of FUNCTION made of it (a
/// float's bits); the step in which it came. `step` is that of the last call that inserted. Any
/// result but 0 fails the call with RECSDK_ERROR_INTERNAL, and nobody has left. It runs under the
/// lock of what it is called for, and must not call it.
typedef int (*recsdk_choose_leaving_callback)(void* user_data, const int64_t* keys,
                                              const int64_t* words, int64_t num_keys,
                                              int64_t num_words, int64_t step, uint8_t* leaves);
/// Evicts the keys that `choose` picks, apart from those below min_age. With `is_dry` not 0 nobody
/// leaves: *num_evicted, which may be null, is how many would. All keys are shown to `choose`, some
/// 65,536 at a time. Conditions as recsdk_table_evict.
RECSDK_API int recsdk_table_evict_where(recsdk_table* table, recsdk_choose_leaving_callback choose,
                                        void* user_data, int is_dry, int64_t* num_evicted);
/// How many recsdk_table_evict would make leave now.
RECSDK_API int recsdk_table_would_evict(recsdk_table* table, int64_t max_rows,
                                        int64_t* num_evicted);
/// Makes the keys leave that have expired by now, or with `is_dry` not 0 only counts them, 0 where
/// none expire. Else invalid argument unless keys expire; busy while leases with a step are open.
/// *num_expired, which may be null, is how many.
RECSDK_API int recsdk_table_expire(recsdk_table* table, int is_dry, int64_t* num_expired);

/// Reads what leaves from now on; `options` may be null: their defaults. *leavers is to be freed
/// with recsdk_leavers_destroy, and may outlive the table. Busy: another one is open, or leases
/// with a step are.
RECSDK_API int recsdk_table_leavers(recsdk_table* table, const recsdk_leavers_options* options,
                                    recsdk_leavers** leavers);
/// Takes up to `capacity` rows that left first, in the order in which they left: keys (capacity,),
/// causes (capacity,) of enum recsdk_leave_cause, weights (capacity, D) and state (capacity, S),
/// null but for keys where not wanted. Writes their number to *num_rows. Of an index D and S are 0.
RECSDK_API int recsdk_leavers_read(recsdk_leavers* leavers, int64_t capacity, int64_t* keys,
                                   uint8_t* causes, float* weights, float* state,
                                   int64_t* num_rows);
/// As recsdk_leavers_read, of an index: rows (capacity,) are the numbers that they had, null where
/// not wanted. Their places stay taken until recsdk_leavers_free_rows. A call that needs places
/// waits for these only, not for keys that are yet to be taken: taking may wait for that call.
RECSDK_API int recsdk_leavers_take(recsdk_leavers* leavers, int64_t capacity, int64_t* keys,
                                   uint8_t* causes, int64_t* rows, int64_t* num_rows);
/// Gives back so many of the places that recsdk_leavers_take has left taken; all if there are
/// fewer.
RECSDK_API int recsdk_leavers_free_rows(recsdk_leavers* leavers, int64_t num_rows);
/// Rows that could be read so far, those that were included. make_rows of the index may call it:
/// the row of a key that left before the key that gets it is among the first *num_ended.
RECSDK_API int recsdk_leavers_num_ended(const recsdk_leavers* leavers, uint64_t* num_ended);
/// Waits until a row can be read, this is closed, the table is gone, or so many seconds have
/// passed; *has_rows: whether one can be read.
RECSDK_API int recsdk_leavers_wait(const recsdk_leavers* leavers, double seconds, int* has_rows);
/// Rows that can be read now, and how many found no place so far; either may be null.
RECSDK_API int recsdk_leavers_size(const recsdk_leavers* leavers, int64_t* num_rows,
                                   uint64_t* num_lost);
/// From here on what leaves is not kept; what has left can still be read. Idempotent.
RECSDK_API int recsdk_leavers_close(recsdk_leavers* leavers);
/// Closes it and frees the handle; null does nothing.
RECSDK_API void recsdk_leavers_destroy(recsdk_leavers* leavers);

/// One optimizer update with gradients (N, D) of keys (N,); those of equal keys are added in order.
/// Keys without a row are missing, not inserted. outcomes (N,) may be null. An empty call advances
/// the update count too.
RECSDK_API int recsdk_table_apply_gradients(recsdk_table* table, const int64_t* keys,
                                            int64_t num_keys, const float* gradients,
                                            uint8_t* outcomes);

/// Pools mapped bags. An empty bag gives zeros.
RECSDK_API int recsdk_table_pool(const recsdk_table* table, const recsdk_pool_block* blocks,
                                 int64_t num_blocks);

/// One optimizer update with the gradients of pooled bags, over all blocks together.
RECSDK_API int recsdk_table_update(recsdk_table* table, const recsdk_grad_block* blocks,
                                   int64_t num_blocks);

/// Multiplies each row of mapped keys (N,) whose p-norm exceeds max_norm >= 0 by
/// max_norm / (norm + 1e-7), once; p = norm_type > 0, infinite for the largest size of a column.
/// Writes to *num_limited, which may be null, how many did. Hold the rows by a lease, as for an
/// update.
RECSDK_API int recsdk_table_limit_norms(recsdk_table* table, const int64_t* rows,
                                        const uint8_t* outcomes, int64_t num_keys, double max_norm,
                                        double norm_type, int64_t* num_limited);
/// By what recsdk_table_limit_norms would multiply: factors (N,), 1 for a row within the limit.
RECSDK_API int recsdk_table_norm_factors(const recsdk_table* table, const int64_t* rows,
                                         const uint8_t* outcomes, int64_t num_keys, double max_norm,
                                         double norm_type, float* factors);

/// The learning rate of the next updates.
RECSDK_API int recsdk_table_learning_rate(const recsdk_table* table, float* learning_rate);
RECSDK_API int recsdk_table_set_learning_rate(recsdk_table* table, float learning_rate);

/// Number of updates so far, empty ones included.
RECSDK_API int recsdk_table_update_count(const recsdk_table* table, uint64_t* count);
/// For restoring a table.
RECSDK_API int recsdk_table_set_update_count(recsdk_table* table, uint64_t count);

/// With catch_up: the sum of log(1 - lr * weight_decay) over all updates; else 0. To be saved and
/// restored with rows.
RECSDK_API int recsdk_table_log_decay(const recsdk_table* table, double* log_decay);
RECSDK_API int recsdk_table_set_log_decay(recsdk_table* table, double log_decay);

/// Number of visible keys.
RECSDK_API int recsdk_table_size(const recsdk_table* table, int64_t* size);

/// `stats->struct_size` must be set.
RECSDK_API int recsdk_table_stats(const recsdk_table* table, recsdk_stats* stats);

/// Bytes of memory held: index, rows, metadata, tracked changes, copies for a cut.
RECSDK_API int recsdk_table_memory_bytes(const recsdk_table* table, int64_t* bytes);

/// Exports up to `capacity` visible rows with row number >= *begin in ascending order of row
/// number: keys (capacity,), weights (capacity, D) or null, state (capacity, S) or null. Writes
/// their number to *num_rows and where to go on to *begin; fewer than capacity means the end. Start
/// with *begin = 0.
RECSDK_API int recsdk_table_export_rows(const recsdk_table* table, int64_t* begin, int64_t capacity,
                                        int64_t* keys, float* weights, float* state,
                                        int64_t* num_rows);

/// Makes room for `num_rows` rows in all: insertions up to there wait for no memory.
RECSDK_API int recsdk_table_reserve(recsdk_table* table, int64_t num_rows);

/// RECSDK_ERROR_INTERNAL, naming the first broken invariant, if there is one. Cost: reads the whole
/// index.
RECSDK_API int recsdk_table_check_invariants(const recsdk_table* table);

// Saving and restoring, see recsdk/checkpoint.h. A row file is one table's part of a checkpoint.

/// Takes a cut; `options` may be null. *cut is to be freed with recsdk_cut_destroy. Busy: a cut is
/// open.
RECSDK_API int recsdk_table_cut(recsdk_table* table, const recsdk_cut_options* options,
                                recsdk_cut** cut);
/// `info->struct_size` must be set.
RECSDK_API int recsdk_cut_get_info(const recsdk_cut* cut, recsdk_cut_info* info);
/// Where the clock stands in the cut. `clock->struct_size` must be set. Invalid argument without
/// eviction and admission.
RECSDK_API int recsdk_cut_get_clock(const recsdk_cut* cut, recsdk_clock* clock);
/// What admission knows of keys without a row (n,), ascending by key, which row files do not hold;
/// *num_records is 0 without admission. The array lives as long as the cut.
RECSDK_API int recsdk_cut_get_records(const recsdk_cut* cut, const recsdk_admit_record** records,
                                      int64_t* num_records);
/// The rows that keys without one share, which row files do not hold; shared->num_rows is 0 without
/// such rows. `shared->struct_size` must be set.
RECSDK_API int recsdk_cut_get_shared(const recsdk_cut* cut, recsdk_shared_rows* shared);
/// Ends the cut; `durable`, a flag: what it held is saved, and changes are tracked from it on. Only
/// the first call counts.
RECSDK_API int recsdk_cut_finish(recsdk_cut* cut, int durable);
/// Ends the cut, not durable, unless it has ended; frees the handle; null does nothing.
RECSDK_API void recsdk_cut_destroy(recsdk_cut* cut);

/// Fills the defaults, see recsdk_write_options. `options->struct_size` must be set.
RECSDK_API int recsdk_write_options_init(recsdk_write_options* options);
/// Writes what the cut holds, once. `summary` may be null. A call that fails ends the cut.
RECSDK_API int recsdk_write_rows(recsdk_cut* cut, const recsdk_write_options* options,
                                 recsdk_row_file_summary* summary);

/// Begins to fill a table, which is left alone until recsdk_restore_commit.
RECSDK_API int recsdk_restore_create(const recsdk_table* table, recsdk_restore** restore);
/// Stages a row file of `size` bytes, open for reading; `name` is for messages. `options` and
/// `summary` may be null. First snapshots, then deltas, oldest first.
RECSDK_API int recsdk_restore_add_file(recsdk_restore* restore, int descriptor, int64_t size,
                                       const char* name, const recsdk_restore_options* options,
                                       recsdk_row_file_summary* summary);
/// Stages what recsdk_cut_get_records gave, all of it or a part; may be called again. Invalid
/// argument without admission, or for what its rule cannot have counted; then begin another
/// restore.
RECSDK_API int recsdk_restore_add_records(recsdk_restore* restore,
                                          const recsdk_admit_record* records, int64_t num_records);
/// Stages rows that keys without one share, as recsdk_cut_get_shared gave them: keys (n,), weights
/// (n, D), and state (n, S) or null, which is a new row's. Those left out are as in a new table.
/// Invalid argument unless the table has such rows, for these keys.
RECSDK_API int recsdk_restore_add_shared(recsdk_restore* restore, const int64_t* keys,
                                         int64_t num_rows, const float* weights,
                                         const float* state);
/// As recsdk_restore_commit, and sets the clock, which else begins anew.
RECSDK_API int recsdk_restore_commit_at(recsdk_restore* restore, uint64_t update_count,
                                        double log_decay, const recsdk_clock* clock);
/// Gives the table the staged rows and these counts of their cut, as a whole or not at all.
RECSDK_API int recsdk_restore_commit(recsdk_restore* restore, uint64_t update_count,
                                     double log_decay);
/// Frees the handle and what is staged; null does nothing.
RECSDK_API void recsdk_restore_destroy(recsdk_restore* restore);

// Tables in a device's memory, see recsdk/device_table.h. Calls with keys take and give arrays of
// the host; _gather and _update take arrays of the device and only hand work over.

/// RECSDK_ERROR_BACKEND_UNAVAILABLE, saying what to install, if the backend cannot be used here.
RECSDK_API int recsdk_require_backend(const char* backend);

/// Fills the defaults; max_device_rows must be set afterwards. `options->struct_size` must be set.
RECSDK_API int recsdk_device_options_init(recsdk_device_options* options);
/// Makes a table; the configs are copied and may go. Cost: the memory of all its rows.
RECSDK_API int recsdk_device_table_create(const recsdk_table_config* config,
                                          const recsdk_device_options* options,
                                          recsdk_device_table** table);
/// Frees the handle and the rows; null does nothing.
RECSDK_API void recsdk_device_table_destroy(recsdk_device_table* table);
/// Waits for the work handed over.
RECSDK_API int recsdk_device_table_synchronize(const recsdk_device_table* table);
/// The table's stream: an aclrtStream for "npu", null for "cpu". Lives as long as the table.
RECSDK_API int recsdk_device_table_stream(const recsdk_device_table* table, void** stream);

/// As the functions of a recsdk_table. A lease is released by recsdk_lease_release.
RECSDK_API int recsdk_device_table_lease(recsdk_device_table* table, int has_step, int64_t step,
                                         recsdk_lease** lease);
RECSDK_API int recsdk_device_table_map(recsdk_device_table* table, const int64_t* keys,
                                       int64_t num_keys, int insert, const recsdk_lease* lease,
                                       int64_t* rows, uint8_t* outcomes);
/// Copies the weights of mapped keys (N,) to `out` (N, D) in device memory, 64-byte aligned.
RECSDK_API int recsdk_device_table_gather(recsdk_device_table* table, const int64_t* rows,
                                          const uint8_t* outcomes, int64_t num_keys, float* out);
/// One optimizer update with `gradients` (N, D) in device memory, 64-byte aligned, of mapped keys
/// (N,). They must stay until the work is done.
RECSDK_API int recsdk_device_table_update(recsdk_device_table* table, const int64_t* rows,
                                          const uint8_t* outcomes, int64_t num_keys,
                                          const float* gradients);
/// Reads rows of keys (N,): values (N, D), state (N, S) or null, outcomes (N,) or null.
RECSDK_API int recsdk_device_table_read_rows(const recsdk_device_table* table, const int64_t* keys,
                                             int64_t num_keys, float* values, float* state,
                                             uint8_t* outcomes);
RECSDK_API int recsdk_device_table_lookup(const recsdk_device_table* table, const int64_t* keys,
                                          int64_t num_keys, float* values, uint8_t* outcomes);
RECSDK_API int recsdk_device_table_find_or_insert(recsdk_device_table* table, const int64_t* keys,
                                                  int64_t num_keys, const recsdk_lease* lease,
                                                  float* values, uint8_t* outcomes);
RECSDK_API int recsdk_device_table_upsert(recsdk_device_table* table, const int64_t* keys,
                                          int64_t num_keys, const float* values, const float* state,
                                          uint8_t* outcomes);
RECSDK_API int recsdk_device_table_erase(recsdk_device_table* table, const int64_t* keys,
                                         int64_t num_keys, uint8_t* outcomes);
RECSDK_API int recsdk_device_table_clear(recsdk_device_table* table);
RECSDK_API int recsdk_device_table_apply_gradients(recsdk_device_table* table, const int64_t* keys,
                                                   int64_t num_keys, const float* gradients,
                                                   uint8_t* outcomes);
RECSDK_API int recsdk_device_table_export_rows(const recsdk_device_table* table, int64_t* begin,
                                               int64_t capacity, int64_t* keys, float* weights,
                                               float* state, int64_t* num_rows);
RECSDK_API int recsdk_device_table_learning_rate(const recsdk_device_table* table,
                                                 float* learning_rate);
RECSDK_API int recsdk_device_table_set_learning_rate(recsdk_device_table* table,
                                                     float learning_rate);
RECSDK_API int recsdk_device_table_update_count(const recsdk_device_table* table, uint64_t* count);
RECSDK_API int recsdk_device_table_set_update_count(recsdk_device_table* table, uint64_t count);
RECSDK_API int recsdk_device_table_size(const recsdk_device_table* table, int64_t* size);
/// S, the width of a row's state.
RECSDK_API int recsdk_device_table_state_width(const recsdk_device_table* table, int64_t* width);
/// `stats->struct_size` must be set.
RECSDK_API int recsdk_device_table_stats(const recsdk_device_table* table,
                                         recsdk_device_stats* stats);
RECSDK_API int recsdk_device_table_check_invariants(const recsdk_device_table* table);

// Many tables at once, spread over the thread pool; a table may occur once. All arguments are
// checked before any table changes. A table either has its part done whole or is unchanged.

RECSDK_API int recsdk_map_tables(const recsdk_map_call* calls, int64_t num_calls);
RECSDK_API int recsdk_pool_tables(const recsdk_pool_call* calls, int64_t num_calls);
RECSDK_API int recsdk_update_tables(const recsdk_update_call* calls, int64_t num_calls);

// An index whose rows the caller keeps: names and meanings are those of recsdk::Index.

/// Fills the defaults. `config->struct_size` must be set.
RECSDK_API int recsdk_index_config_init(recsdk_index_config* config);
/// Makes an empty index; the config is copied and may go.
RECSDK_API int recsdk_index_create(const recsdk_index_config* config, recsdk_index** index);
/// Frees the handle; null does nothing. Leases and cuts may outlive it.
RECSDK_API void recsdk_index_destroy(recsdk_index* index);
RECSDK_API int recsdk_index_lease(recsdk_index* index, int has_step, int64_t step,
                                  recsdk_lease** lease);
RECSDK_API int recsdk_index_map(recsdk_index* index, const int64_t* keys, int64_t num_keys,
                                int insert, const recsdk_lease* lease, int64_t* rows,
                                uint8_t* outcomes);
/// An index may occur once; as recsdk_map_tables.
RECSDK_API int recsdk_map_indexes(const recsdk_index_map_call* calls, int64_t num_calls);
/// As the functions of a recsdk_table.
RECSDK_API int recsdk_index_map_with(recsdk_index* index, const int64_t* keys, int64_t num_keys,
                                     const recsdk_lease* lease, const recsdk_key_data* data,
                                     int64_t* rows, uint8_t* outcomes);
RECSDK_API int recsdk_index_set_time(recsdk_index* index, int64_t time);
RECSDK_API int recsdk_index_evict(recsdk_index* index, int64_t max_rows, int64_t* num_evicted);
RECSDK_API int recsdk_index_evict_where(recsdk_index* index, recsdk_choose_leaving_callback choose,
                                        void* user_data, int is_dry, int64_t* num_evicted);
RECSDK_API int recsdk_index_would_evict(recsdk_index* index, int64_t max_rows,
                                        int64_t* num_evicted);
RECSDK_API int recsdk_index_expire(recsdk_index* index, int is_dry, int64_t* num_expired);
/// Reads which keys leave from now on, and where their rows are: recsdk_leavers_take them, copy the
/// rows before they get other keys' values, and recsdk_leavers_free_rows their places. make_rows
/// sees by recsdk_leavers_num_ended which rows left before those that it makes. Otherwise as
/// recsdk_table_leavers.
RECSDK_API int recsdk_index_leavers(recsdk_index* index, const recsdk_leavers_options* options,
                                    recsdk_leavers** leavers);
/// Takes keys (N,) out, or all, as recsdk_table_erase and recsdk_table_clear: outcomes (N,) or
/// null.
RECSDK_API int recsdk_index_erase(recsdk_index* index, const int64_t* keys, int64_t num_keys,
                                  uint8_t* outcomes);
RECSDK_API int recsdk_index_clear(recsdk_index* index);
/// Replaces all keys by distinct keys (N,), which get the rows 0 to N - 1; make_rows is not called.
RECSDK_API int recsdk_index_assign(recsdk_index* index, const int64_t* keys, int64_t num_keys);
/// Fails with RECSDK_ERROR_BUSY while leases or a cut are open.
RECSDK_API int recsdk_index_check_idle(const recsdk_index* index);
RECSDK_API int recsdk_index_size(const recsdk_index* index, int64_t* size);
/// One past the highest row number that was ever given.
RECSDK_API int recsdk_index_end_row(const recsdk_index* index, int64_t* end_row);
/// `stats->struct_size` must be set. The counts that only a table has are 0.
RECSDK_API int recsdk_index_stats(const recsdk_index* index, recsdk_stats* stats);
/// Copies up to `capacity` visible keys and their rows, from row *begin on, which is set to where
/// to go on. Fewer than capacity means the end.
RECSDK_API int recsdk_index_export_keys(const recsdk_index* index, int64_t* begin, int64_t capacity,
                                        int64_t* keys, int64_t* rows, int64_t* num_keys);
/// Takes a cut, of changes if `changes_only`, a flag. *cut is to be ended by
/// recsdk_index_cut_finish. Busy: a cut is open.
RECSDK_API int recsdk_index_cut_begin(recsdk_index* index, int changes_only,
                                      recsdk_index_cut** cut);
/// `changes->struct_size` must be set.
RECSDK_API int recsdk_index_cut_read(const recsdk_index_cut* cut, recsdk_index_changes* changes);
/// Ends the cut and frees the handle; null does nothing. `durable` is a flag: changes count from
/// the cut on, else it is as if it had never been.
RECSDK_API void recsdk_index_cut_finish(recsdk_index_cut* cut, int durable);
/// *is_tracking: whether a cut may be of changes only.
RECSDK_API int recsdk_index_is_tracking(const recsdk_index* index, int* is_tracking);
/// The next cut of changes names the keys of these rows (num_rows,), too.
RECSDK_API int recsdk_index_note_changed(recsdk_index* index, const int64_t* rows,
                                         int64_t num_rows);
RECSDK_API int recsdk_index_reserve(recsdk_index* index, int64_t num_rows);
RECSDK_API int recsdk_index_check_invariants(const recsdk_index* index);

/// The initial rows of keys (N,) of a table of this name: values (N, D). See
/// recsdk::initial_weights.
RECSDK_API int recsdk_initial_weights(const recsdk_initializer_config* initializer, uint64_t seed,
                                      const char* table_name, int64_t dim, const int64_t* keys,
                                      int64_t num_keys, float* values);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // RECSDK_C_API_H
