/// Frozen tables in C11: what recsdk/serving/serving_table.h says, in librecsdk_serving.
///
/// Shape letters: N keys, B bags, D row width.
///
/// Status. A function that returns int gives RECSDK_SERVING_OK or another status, and then leaves a
/// message for this thread, which recsdk_serving_last_error_message() gives.
///
/// Arguments. A pointer must not be null unless its description says so; an array of length 0 may
/// be null. A null pointer, a negative count, one that no array has, or an unknown enum value is
/// RECSDK_SERVING_ERROR_INVALID_ARGUMENT. Strings are UTF-8, terminated by a zero byte. Arrays
/// belong to the caller, are aligned for their type, and are only used during the call. What a call
/// writes lies over none of its other arrays, of no table, else it is
/// RECSDK_SERVING_ERROR_INVALID_ARGUMENT.
///
/// Thread safety: every function may be called from any thread, also on one table, but for
/// recsdk_serving_take, which one thread calls at a time, and functions of one delta;
/// recsdk_serving_close must come after all other calls on its table.
///
/// ABI rule: RECSDK_SERVING_ABI_VERSION rises by one when a program compiled against the header
/// before could misbehave. It stays when a function, an enumerator, or a field at the end of a
/// struct that begins with struct_size is added.
///
/// A complete program: examples/serve.c.
#ifndef RECSDK_SERVING_C_API_H
#define RECSDK_SERVING_C_API_H

#include <stddef.h>
#include <stdint.h>

#include "recsdk/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/// Version of this binary interface; see the rule above.
#define RECSDK_SERVING_ABI_VERSION 1

/// The codes of functions that return int.
enum recsdk_serving_status {
  RECSDK_SERVING_OK = 0,
  RECSDK_SERVING_ERROR_INVALID_ARGUMENT = 1,  ///< a mistake of the caller
  RECSDK_SERVING_ERROR_OUT_OF_MEMORY = 2,     ///< the operating system gave no memory
  RECSDK_SERVING_ERROR_INTERNAL = 7,          ///< a broken invariant
  RECSDK_SERVING_ERROR_FILE = 8,              ///< a file is missing, damaged or does not fit
};

/// What became of a key; outcome arrays hold these as uint8_t.
enum recsdk_serving_outcome {
  RECSDK_SERVING_FOUND = 0,    ///< the key has a row
  RECSDK_SERVING_MISSING = 3,  ///< it has none, and reads the default value
};

/// How the rows of a bag become one vector.
enum recsdk_serving_pooling {
  RECSDK_SERVING_SUM = 0,
  RECSDK_SERVING_MEAN = 1,
};

/// How rows are stored. Equal to recsdk::FrozenDType.
enum recsdk_serving_dtype {
  RECSDK_SERVING_FLOAT32 = 0,
  RECSDK_SERVING_BFLOAT16 = 1,
  RECSDK_SERVING_FLOAT16 = 2,
  RECSDK_SERVING_INT8 = 3,
  RECSDK_SERVING_INT4 = 4,
};

/// A table that is open.
typedef struct recsdk_serving_table recsdk_serving_table;

/// What changed since a version of a table.
typedef struct recsdk_serving_delta recsdk_serving_delta;

/// What is known of a table.
typedef struct recsdk_serving_info {
  size_t struct_size;   ///< set it to sizeof(recsdk_serving_info) before the call
  const char* name;     ///< lives as long as the table
  int64_t dim;          ///< D
  int64_t num_rows;     ///< of the files that are open, with the deltas that were taken
  int64_t row_bytes;    ///< of a stored row, without its key
  int64_t num_bytes;    ///< of the files that are open
  int64_t num_shards;   ///< files that the table is cut into
  int32_t dtype;        ///< enum recsdk_serving_dtype
  float default_value;  ///< what every column of a missing key reads
  int32_t is_whole;     ///< flag: all shards are open
  int32_t reserved;     ///< 0
  int64_t num_deltas;   ///< taken since the table was opened
  int64_t delta_bytes;  ///< of memory that they take now
  int64_t num_shared;   ///< rows that missing keys share, in place of default_value; or 0
} recsdk_serving_info;

/// Bags of one table.
typedef struct recsdk_serving_call {
  const recsdk_serving_table* table;
  const int64_t* keys;     ///< (N,); an unsigned id is passed as the same 64 bits
  int64_t num_keys;        ///< N
  const int64_t* offsets;  ///< (B + 1,), from 0 to N; null: a bag per key
  int64_t num_bags;        ///< B; without offsets N
  const float* weights;    ///< (N,) or null
  int32_t pooling;         ///< enum recsdk_serving_pooling
  int32_t reserved;        ///< must be 0
  float* out;              ///< bag b to out[b * stride], D floats
  int64_t stride;          ///< in floats, >= D
  uint8_t* outcomes;       ///< (N,) or null
} recsdk_serving_call;

/// RECSDK_SERVING_ABI_VERSION of the library.
RECSDK_API uint32_t recsdk_serving_abi_version(void);

/// What the last failed call of this thread said; "" if none failed.
RECSDK_API const char* recsdk_serving_last_error_message(void);

/// Opens the files of one table. See recsdk::ServingTable.
RECSDK_API int recsdk_serving_open(const char* const* files, int64_t num_files,
                                   recsdk_serving_table** table);

/// Closes a table; null is nothing.
RECSDK_API void recsdk_serving_close(recsdk_serving_table* table);

/// Fills `info`.
RECSDK_API int recsdk_serving_get_info(const recsdk_serving_table* table,
                                       recsdk_serving_info* info);

/// Compares every byte with its checksum.
RECSDK_API int recsdk_serving_verify(const recsdk_serving_table* table);

/// Has the system read all files into memory.
RECSDK_API int recsdk_serving_preload(const recsdk_serving_table* table);

/// Copies the rows of keys (N,) to values (N, D). outcomes (N,) or null.
RECSDK_API int recsdk_serving_lookup(const recsdk_serving_table* table, const int64_t* keys,
                                     int64_t num_keys, float* values, uint8_t* outcomes);

/// Pools bags of one table or many. All calls are checked before the first is read.
RECSDK_API int recsdk_serving_pool(const recsdk_serving_call* calls, int64_t num_calls);

/// Begins a delta of a table. See recsdk::ServingDelta; recsdk_serving_delta_destroy ends it.
RECSDK_API int recsdk_serving_delta_create(const recsdk_serving_table* table,
                                           recsdk_serving_delta** delta);

/// Frees a delta; null is nothing.
RECSDK_API void recsdk_serving_delta_destroy(recsdk_serving_delta* delta);

/// Adds rows (N, D) of keys (N,), of which none is added if one cannot be stored.
RECSDK_API int recsdk_serving_delta_add(recsdk_serving_delta* delta, const int64_t* keys,
                                        int64_t num_keys, const float* weights);

/// Adds rows (m, D) that missing keys share, each under a key (m,) that reads it: all or none.
RECSDK_API int recsdk_serving_delta_add_shared(recsdk_serving_delta* delta, const int64_t* keys,
                                               int64_t num_keys, const float* weights);

/// Adds keys (N,) that have left.
RECSDK_API int recsdk_serving_delta_erase(recsdk_serving_delta* delta, const int64_t* keys,
                                          int64_t num_keys);

/// Puts a delta in front of what the table has, whole or not at all, while others read.
RECSDK_API int recsdk_serving_take(recsdk_serving_table* table, const recsdk_serving_delta* delta);

/// The shard of a key, for routers.
RECSDK_API int recsdk_serving_shard(int64_t key, int64_t num_shards, int64_t* shard);

#ifdef __cplusplus
}
#endif

#endif
