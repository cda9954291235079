/* An index with rows of one's own, in C: a vector for each raw id, in a plain array.
 *
 * The index gives each id a row number, and calls make_row for those that are new; what lies in the
 * rows is up to the program. Here initial vectors are those of a table of the same name and seed.
 */
#include <stdio.h>
#include <stdlib.h>

#include "recsdk/c_api.h"

enum { DIM = 2, MAX_ROWS = 3, NUM_KEYS = 4 };

#define CHECK(call)                                                    \
  do {                                                                 \
    if ((call) != RECSDK_OK) {                                         \
      fprintf(stderr, "%s: %s\n", #call, recsdk_last_error_message()); \
      exit(EXIT_FAILURE);                                              \
    }                                                                  \
  } while (0)

/* No lease is taken here: while one is open, rows of ids that left are kept back, and the numbers
 * of new ones may go beyond max_rows. */
static float rows_of_ids[MAX_ROWS][DIM];

/* Runs under the index's lock, before anybody sees the new ids. */
static int make_rows(void* user_data, const int64_t* keys, const uint32_t* rows, int64_t num_rows) {
  const recsdk_initializer_config* const initializer = user_data;
  for (int64_t i = 0; i < num_rows; ++i) {
    float* const row = rows_of_ids[rows[i]];
    const int status = recsdk_initial_weights(initializer, 0, "user", DIM, &keys[i], 1, row);
    if (status != RECSDK_OK) return status;
  }
  return 0;
}

int main(void) {
  recsdk_initializer_config initializer = {.struct_size = sizeof(initializer)};
  CHECK(recsdk_initializer_config_init(&initializer));
  initializer.kind = RECSDK_INITIALIZER_UNIFORM;
  initializer.low = -0.5F;
  initializer.high = 0.5F;

  recsdk_index_config config = {.struct_size = sizeof(config)};
  CHECK(recsdk_index_config_init(&config));
  config.name = "user";
  config.max_rows = MAX_ROWS;
  config.has_max_rows = 1;
  config.make_rows = make_rows;
  config.user_data = &initializer;
  recsdk_index* index = NULL;
  CHECK(recsdk_index_create(&config, &index));

  const int64_t keys[NUM_KEYS] = {9000000000000000001, 0, 42, -7};
  int64_t rows[NUM_KEYS];
  uint8_t outcomes[NUM_KEYS];
  CHECK(recsdk_index_map(index, keys, NUM_KEYS, 1, NULL, rows, outcomes));
  for (int i = 0; i < NUM_KEYS; ++i) {
    if (outcomes[i] == RECSDK_OUTCOME_REFUSED) {
      printf("%lld: refused, the index is full\n", (long long)keys[i]);
    } else {
      const float* const row = rows_of_ids[rows[i]];
      printf("%lld: row %lld, [%.3f, %.3f]\n", (long long)keys[i], (long long)rows[i],
             (double)row[0], (double)row[1]);
    }
  }
  int64_t size = 0;
  CHECK(recsdk_index_size(index, &size));
  recsdk_index_destroy(index);
  return size == MAX_ROWS && outcomes[NUM_KEYS - 1] == RECSDK_OUTCOME_REFUSED ? EXIT_SUCCESS
                                                                              : EXIT_FAILURE;
}
