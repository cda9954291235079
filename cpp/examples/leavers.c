/* Rows of one's own for the ids seen last, in C: those of ids that left are kept elsewhere.
 *
 * The index has room for MAX_IDS ids; for others the one not seen for longest leaves. A queue says
 * which ids left and which rows they had. Their rows are copied before the next call, which may
 * give the row numbers to other ids, and come back with their ids. With batches in flight (leases)
 * an id can be read from the queue once none of them uses its row.
 */
#include <stdio.h>
#include <stdlib.h>

#include "recsdk/c_api.h"

enum { MAX_IDS = 2, NUM_ROWS = MAX_IDS + 1, NUM_CALLS = 5, NUM_IDS = 8 };

#define CHECK(call)                                                    \
  do {                                                                 \
    if ((call) != RECSDK_OK) {                                         \
      fprintf(stderr, "%s: %s\n", #call, recsdk_last_error_message()); \
      exit(EXIT_FAILURE);                                              \
    }                                                                  \
  } while (0)

/* How often each id was seen: a row of one number. A call's new ids come before others leave, so
 * there is a row more than ids. */
static int rows_of_ids[NUM_ROWS];
static int elsewhere[NUM_IDS];

static void keep_what_left(recsdk_leavers* leavers) {
  int64_t ids[NUM_ROWS];
  int64_t rows[NUM_ROWS];
  uint8_t causes[NUM_ROWS];
  int64_t num_left = 0;
  CHECK(recsdk_leavers_take(leavers, NUM_ROWS, ids, causes, rows, &num_left));
  for (int64_t i = 0; i < num_left; ++i) {
    elsewhere[ids[i]] = rows_of_ids[rows[i]];
    printf("%lld left row %lld%s\n", (long long)ids[i], (long long)rows[i],
           causes[i] == RECSDK_LEFT_EVICTED ? " for another" : "");
  }
  CHECK(recsdk_leavers_free_rows(leavers, num_left));
}

int main(void) {
  recsdk_evict_config lru = {.struct_size = sizeof(lru)};
  CHECK(recsdk_evict_config_init(&lru)); /* whoever was not seen for longest leaves */
  recsdk_index_config config = {.struct_size = sizeof(config)};
  CHECK(recsdk_index_config_init(&config));
  config.name = "user";
  config.max_rows = MAX_IDS;
  config.has_max_rows = 1;
  config.eviction_groups = 1; /* so that it has room for any two ids */
  config.has_eviction_groups = 1;
  config.eviction = &lru;
  recsdk_index* index = NULL;
  CHECK(recsdk_index_create(&config, &index));

  recsdk_leavers_options options = {.struct_size = sizeof(options)};
  CHECK(recsdk_leavers_options_init(&options));
  options.max_rows = NUM_ROWS;
  options.on_overflow = RECSDK_OVERFLOW_RAISE;
  recsdk_leavers* leavers = NULL;
  CHECK(recsdk_index_leavers(index, &options, &leavers));

  const int64_t ids[NUM_CALLS] = {1, 7, 1, 3, 7};
  int seen = 0;
  for (int i = 0; i < NUM_CALLS; ++i) {
    int64_t row = 0;
    uint8_t outcome = 0;
    CHECK(recsdk_index_map(index, &ids[i], 1, 1, NULL, &row, &outcome));
    keep_what_left(leavers);
    if (outcome == RECSDK_OUTCOME_INSERTED) rows_of_ids[row] = elsewhere[ids[i]];
    seen = ++rows_of_ids[row];
    printf("%lld: row %lld, seen %d times\n", (long long)ids[i], (long long)row, seen);
  }
  uint64_t num_ended = 0;
  CHECK(recsdk_leavers_num_ended(leavers, &num_ended));
  recsdk_leavers_destroy(leavers);
  recsdk_index_destroy(index);
  return num_ended == 2 && seen == 2 ? EXIT_SUCCESS : EXIT_FAILURE; /* 7 came back with its row */
}
