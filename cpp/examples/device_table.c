// Keeps the rows of a table in a device's memory, and trains them from the host: no torch.
//
//   cc -std=c11 device_table.c $(pkg-config --cflags --libs --static recsdk)
//   ./a.out npu    on Ascend's NPU; without an argument in the host's own memory
#include <stdio.h>
#include <stdlib.h>

#include "recsdk/c_api.h"

enum { NUM_KEYS = 4, DIM = 8, NUM_STEPS = 30, MAX_ROWS = 3 };

static void check(int status, const char* call) {
  if (status == RECSDK_OK) return;
  fprintf(stderr, "%s: error %d: %s\n", call, status, recsdk_last_error_message());
  exit(EXIT_FAILURE);
}
#define CHECK(call) check((call), #call)

static recsdk_device_table* make_table(const char* backend) {
  recsdk_optimizer_config optimizer = {.struct_size = sizeof optimizer};
  CHECK(recsdk_optimizer_config_init(&optimizer, RECSDK_OPTIMIZER_ADAGRAD));
  optimizer.learning_rate = 0.5F;
  recsdk_table_config config = {.struct_size = sizeof config};
  CHECK(recsdk_table_config_init(&config));
  config.dim = DIM;
  config.name = "item_id";
  config.optimizer = &optimizer;
  recsdk_device_options options = {.struct_size = sizeof options};
  CHECK(recsdk_device_options_init(&options));
  options.backend = backend;
  options.max_device_rows = MAX_ROWS;
  recsdk_device_table* table = NULL;
  CHECK(recsdk_device_table_create(&config, &options, &table));
  return table;
}

int main(int argc, char** argv) {
  recsdk_device_table* const table = make_table(argc > 1 ? argv[1] : "cpu");
  // One key more than there is room for: it is refused, reads zeros, and learns nothing.
  const int64_t keys[NUM_KEYS] = {-7, 0, 42, 9000000000000000001};
  float values[NUM_KEYS * DIM];
  float gradients[NUM_KEYS * DIM];
  uint8_t outcomes[NUM_KEYS];
  float loss = 0.0F;
  for (int step = 0; step < NUM_STEPS; ++step) {
    CHECK(recsdk_device_table_find_or_insert(table, keys, NUM_KEYS, NULL, values, outcomes));
    loss = 0.0F;
    for (int i = 0; i < NUM_KEYS * DIM; ++i) {
      const float error = values[i] - 1.0F;
      if (outcomes[i / DIM] != RECSDK_OUTCOME_REFUSED) loss += error * error;
      gradients[i] = 2.0F * error;
    }
    CHECK(recsdk_device_table_apply_gradients(table, keys, NUM_KEYS, gradients, NULL));
  }
  printf("loss %.6f, %s\n", (double)loss,
         outcomes[NUM_KEYS - 1] == RECSDK_OUTCOME_REFUSED ? "one key refused" : "?");
  recsdk_device_table_destroy(table);
  return loss < 1e-3F ? EXIT_SUCCESS : EXIT_FAILURE;
}
