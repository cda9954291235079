// The inner loop of a server: answers requests from frozen tables, without what trained them.
//
//     serve TABLE.frozen... < requests
//
// Opens the files of one table. Each line of the standard input is a request: the keys of a bag. It
// is answered by a line: how many keys had a row, then the mean of the rows.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "recsdk/serving/c_api.h"

enum { kMostKeys = 1024, kLineBytes = 32768 };

typedef struct {
  recsdk_serving_table* table;
  int64_t dim;
  float* vector;  // (D,)
} server;

static int failed(const char* what) {
  fprintf(stderr, "serve: %s: %s\n", what, recsdk_serving_last_error_message());
  return 1;
}

/// Opens the table, and reads it into memory before the first request has to wait for a disk.
static int start(server* s, int num_files, const char* const* files) {
  recsdk_serving_info info = {.struct_size = sizeof(info)};
  if (recsdk_serving_abi_version() != RECSDK_SERVING_ABI_VERSION) return failed("another library");
  if (recsdk_serving_open(files, num_files, &s->table)) return failed("opening");
  if (recsdk_serving_get_info(s->table, &info)) return failed("looking at the table");
  if (recsdk_serving_preload(s->table)) return failed("reading ahead");
  s->dim = info.dim;
  s->vector = malloc((size_t)info.dim * sizeof(float));
  fprintf(stderr, "serve: table %s, %" PRId64 " rows of width %" PRId64 "\n", info.name,
          info.num_rows, info.dim);
  return s->vector == NULL;
}

/// The keys of a line; returns how many.
static int64_t parse(const char* line, int64_t* keys) {
  int64_t n = 0;
  char* end = NULL;
  for (; n < kMostKeys; ++n, line = end) {
    keys[n] = strtoll(line, &end, 10);
    if (end == line) break;
  }
  return n;
}

static int answer(const server* s, const char* line) {
  int64_t keys[kMostKeys];
  uint8_t outcomes[kMostKeys];
  const int64_t offsets[2] = {0, parse(line, keys)};
  const recsdk_serving_call call = {.table = s->table,
                                    .keys = keys,
                                    .num_keys = offsets[1],
                                    .offsets = offsets,
                                    .num_bags = 1,
                                    .pooling = RECSDK_SERVING_MEAN,
                                    .out = s->vector,
                                    .stride = s->dim,
                                    .outcomes = outcomes};
  if (recsdk_serving_pool(&call, 1)) return failed("pooling");
  int num_found = 0;
  for (int64_t i = 0; i < offsets[1]; ++i) num_found += outcomes[i] == RECSDK_SERVING_FOUND;
  printf("%d", num_found);
  for (int64_t i = 0; i < s->dim; ++i) printf(" %g", (double)s->vector[i]);
  printf("\n");
  return 0;
}

int main(int num_arguments, char** arguments) {
  static char line[kLineBytes];
  server s = {0};
  int status = start(&s, num_arguments - 1, (const char* const*)arguments + 1);
  while (status == 0 && fgets(line, sizeof(line), stdin) != NULL) status = answer(&s, line);
  recsdk_serving_close(s.table);
  free(s.vector);
  return status;
}
