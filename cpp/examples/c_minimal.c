// The smallest C program that trains a table: three raw ids, one weight each, squared error.
//
//   cc -std=c11 c_minimal.c $(pkg-config --cflags --libs --static recsdk)
#include <stdio.h>
#include <stdlib.h>

#include "recsdk/c_api.h"

enum { NUM_KEYS = 3, NUM_STEPS = 20 };

static void check(int status, const char* call) {
  if (status == RECSDK_OK) return;
  fprintf(stderr, "%s: error %d: %s\n", call, status, recsdk_last_error_message());
  exit(EXIT_FAILURE);
}
#define CHECK(call) check((call), #call)

static recsdk_table* make_table(void) {
  recsdk_optimizer_config optimizer = {.struct_size = sizeof optimizer};
  CHECK(recsdk_optimizer_config_init(&optimizer, RECSDK_OPTIMIZER_ADAGRAD));
  optimizer.learning_rate = 0.5F;

  recsdk_table_config config = {.struct_size = sizeof config};
  CHECK(recsdk_table_config_init(&config));
  config.dim = 1;
  config.name = "item_id";
  config.optimizer = &optimizer;

  recsdk_table* table = NULL;
  CHECK(recsdk_table_create(&config, &table));
  return table;
}

// One step over the batch; returns its loss.
static float train(recsdk_table* table, int64_t step, const int64_t* keys, const float* targets) {
  recsdk_lease* lease = NULL;
  CHECK(recsdk_table_lease(table, 1, step, &lease));

  float values[NUM_KEYS];
  CHECK(recsdk_table_find_or_insert(table, keys, NUM_KEYS, lease, values, NULL));
  recsdk_lease_release(lease);

  float loss = 0.0F;
  float gradients[NUM_KEYS];
  for (int i = 0; i < NUM_KEYS; ++i) {
    const float error = values[i] - targets[i];
    loss += error * error / (float)NUM_KEYS;
    gradients[i] = 2.0F * error / (float)NUM_KEYS;
  }
  CHECK(recsdk_table_apply_gradients(table, keys, NUM_KEYS, gradients, NULL));
  return loss;
}

int main(void) {
  if (recsdk_abi_version() != RECSDK_ABI_VERSION) {
    fprintf(stderr, "librecsdk %s has another ABI; compile this program anew\n", recsdk_version());
    return EXIT_FAILURE;
  }
  const int64_t keys[NUM_KEYS] = {-7, 0, 9000000000000000001};
  const float targets[NUM_KEYS] = {1.0F, -0.5F, 0.25F};

  recsdk_table* table = make_table();
  float first = 0.0F;
  float last = 0.0F;
  for (int step = 0; step < NUM_STEPS; ++step) {
    last = train(table, step, keys, targets);
    if (step == 0) first = last;
  }
  int64_t size = 0;
  CHECK(recsdk_table_size(table, &size));
  printf("%lld rows, loss %.4f -> %.4f\n", (long long)size, (double)first, (double)last);
  recsdk_table_destroy(table);
  return size == NUM_KEYS && last < 0.01F * first ? EXIT_SUCCESS : EXIT_FAILURE;
}
