// Who gets a row, in C: ids at their third occurrence, or once somebody has clicked on them.
//
//   cc -std=c11 admission.c $(pkg-config --cflags --libs --static recsdk)
#include <stdio.h>
#include <stdlib.h>

#include "recsdk/c_api.h"

enum { NUM_KEYS = 3 };

static void check(int status, const char* call) {
  if (status == RECSDK_OK) return;
  fprintf(stderr, "%s: error %d: %s\n", call, status, recsdk_last_error_message());
  exit(EXIT_FAILURE);
}
#define CHECK(call) check((call), #call)

static recsdk_table* make_table(void) {
  // In postfix order: both terms, and then what joins them.
  const recsdk_admit_term rule[] = {
      {.kind = RECSDK_ADMIT_COUNT, .count = 3},
      {.kind = RECSDK_ADMIT_SHOW_CLICK, .beta = 1.0, .threshold = 1.0},
      {.kind = RECSDK_ADMIT_ANY},
  };
  recsdk_admit_config admission = {.struct_size = sizeof admission};
  CHECK(recsdk_admit_config_init(&admission));
  admission.rule = rule;
  admission.num_terms = sizeof rule / sizeof *rule;
  admission.max_records = 1000000;  // about 50 bytes each
  admission.has_max_records = 1;

  recsdk_table_config config = {.struct_size = sizeof config};
  CHECK(recsdk_table_config_init(&config));
  config.dim = 8;
  config.name = "item_id";
  config.admission = &admission;

  recsdk_table* table = NULL;
  CHECK(recsdk_table_create(&config, &table));
  return table;
}

int main(void) {
  recsdk_table* const table = make_table();
  const int64_t keys[NUM_KEYS] = {-7, 42, 42};
  const int64_t clicks[2][NUM_KEYS] = {{0, 0, 0}, {1, 0, 0}};
  int64_t rows[NUM_KEYS];
  uint8_t outcomes[NUM_KEYS];
  for (int step = 0; step < 2; ++step) {
    const recsdk_key_data data = {.clicks = clicks[step], .num_clicks = NUM_KEYS};
    CHECK(recsdk_table_map_with(table, keys, NUM_KEYS, NULL, &data, rows, outcomes));
    for (int i = 0; i < NUM_KEYS; ++i) {
      const int is_out = outcomes[i] == RECSDK_OUTCOME_NOT_ADMITTED;
      printf("step %d, %lld: %s\n", step, (long long)keys[i], is_out ? "no row yet" : "a row");
    }
  }
  int64_t size = 0;
  CHECK(recsdk_table_size(table, &size));
  recsdk_table_destroy(table);
  return size == 2 ? EXIT_SUCCESS : EXIT_FAILURE;
}
