// The loops over records of frozen files, written once in serving_kernels.inc and compiled for each
// instruction set, as those of kernels/kernels.h: all give the same bits. They read nothing outside
// a record, allocate nothing, take no lock and do not throw.
#pragma once

#include <cstddef>
#include <cstdint>

#include "recsdk/serving/frozen.h"
#include "recsdk/types.h"
#include "serving/frozen_file.h"

namespace recsdk::internal {

/// The files of a table, of which those are open that the keys ask for, or the images of a layer.
struct FindArgs {
  const FrozenView* const* views;  // by shard, or by range of hashes
  std::uint32_t num_views;
  int range_bits;  // 2^range_bits images of a layer; 0 for files, and for a layer of one image
  const Key* keys;
  std::size_t num_keys;
  const std::byte** records;  // out: of each key a candidate, or null
};

/// Candidates for the records of keys [begin, end) of a call: one whose tag is equal, and whose key
/// is compared when its row is read; null for a missing key. Entry 0 is of key `begin`.
struct Candidates {
  const Key* keys;  // entry 0 is of key `begin`, too
  std::int64_t begin;
  std::int64_t end;
  const std::byte** records;
  std::int64_t record_bytes;
  Outcome* outcomes;  // of the whole call, or null
  /// The record of a key after a tag that was another's; null if there is none.
  const std::byte* (*find_again)(const void* context, Key key);
  const void* context;
};

struct FrozenRows {
  FrozenDType dtype;
  std::int64_t dim;
  float default_value;
};

/// Copies the rows of candidates: of key i to values + i * dim.
struct ServingGatherArgs {
  Candidates candidates;
  FrozenRows rows;
  float* values;
};

/// Adds the rows of candidates to their bags. Sums of a bag that goes on beyond `end` stay in
/// `out` and `biases`, and are taken up by the call for the keys behind.
struct ServingPoolArgs {
  Candidates candidates;
  FrozenRows rows;
  const std::int64_t* offsets;  // (B + 1,), or null: a bag per key
  const float* weights;         // (N,) or null
  Pooling pooling;
  std::int64_t num_bags;
  float* out;
  std::int64_t stride;
  std::int64_t next_bag;  // in: the first bag that is not done; out: the same behind this call
  float biases;           // of quantized rows of that bag
};

struct ServingKernels {
  void (*find)(const FindArgs&);
  void (*gather)(const ServingGatherArgs&);
  void (*pool)(ServingPoolArgs&);
};

/// Those of the instruction set in use.
const ServingKernels& serving_kernels();

extern const ServingKernels kServingKernelsBaseline;
extern const ServingKernels kServingKernelsAvx2;
extern const ServingKernels kServingKernelsAvx512;

}  // namespace recsdk::internal
