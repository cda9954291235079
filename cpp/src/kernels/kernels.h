// The loops over rows, written once in kernels_*.inc on vector extensions and compiled for each
// instruction set; all of them give the same bits. They allocate nothing, take no lock and do not
// throw. Records are read and written in whole 16-byte steps (their fields are padded to that),
// buffers of the caller never beyond their D floats.
//
// Why equal bits: element-wise work rounds the same in any register width because contraction to
// fused multiply-add is off; sums over a row always use 16 lanes (lane l adds elements l, l+16,
// ...) and one fixed tree to add the lanes. Where a result is not a number, its payload may differ.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "recsdk/initializer.h"
#include "recsdk/optimizer.h"
#include "recsdk/row_layout.h"
#include "recsdk/types.h"

namespace recsdk::internal {

/// Address arithmetic of rows in fixed slabs [records | scalars]: the scalars of a slab's rows lie
/// side by side behind its records, which so keep their alignment.
struct RowAddresses {
  std::byte* const* slabs;
  int shift;
  std::int64_t mask;
  std::int64_t stride;         // bytes of a record
  std::int64_t scalar_stride;  // bytes of a row's scalars
  std::int64_t scalars_begin;  // bytes from a slab's first record on

  std::byte* record(std::int64_t r) const { return slabs[r >> shift] + (r & mask) * stride; }
  std::byte* scalars(std::int64_t r) const {
    return slabs[r >> shift] + scalars_begin + (r & mask) * scalar_stride;
  }
};

/// What keys without a row read: rows by what stands in place of a row number, or a value.
struct DefaultRows {
  float value = 0.0F;
  bool has_rows = false;
  RowAddresses rows = {};
};

/// Pools bags [bag_begin, bag_end) of one block. Offsets null: each key is a bag. Rows, outcomes
/// and weights are those of the block's keys from `key_base` on, offsets and `out` of the whole
/// block.
struct PoolArgs {
  RowAddresses addresses;
  DType weight_dtype;
  std::int64_t dim;
  DefaultRows defaults;
  const RowNumber* rows;
  const Outcome* outcomes;
  const std::int64_t* offsets;
  const float* weights;  // or null
  Pooling pooling;
  std::int64_t key_base;
  std::int64_t bag_begin;
  std::int64_t bag_end;
  float* out;           // of bag 0
  std::int64_t stride;  // floats
};

/// Gradients of the weights of bags [bag_begin, bag_end): weights_grad[i] is the derivative of
/// sum(grad * pooled) by weights[i].
struct WeightsGradArgs {
  PoolArgs bags;             // out is not used
  const float* grad;         // of bag 0
  std::int64_t grad_stride;  // floats
  float* weights_grad;       // (N,)
};

/// One vector that gradients are read from, and the factor of it.
struct GradSource {
  const float* grad;
  float scale;
};

/// One occurrence of a row in a backward.
struct GradItem {
  std::uint32_t row;
  std::uint32_t source;  // index into the sources
};

/// The optimizer's numbers as the loop needs them. Filled by make_optimizer_step.
struct OptimizerStep {
  OptimizerKind kind;
  NonFinite on_nonfinite;  // kRaise has been checked before and is handled as kApply
  float learning_rate;     // Adagrad: lr / (1 + (t - 1) * lr_decay); Adam and partial rowwise Adam
                           // by the table's count: lr / (1 - b1^t)
  float eps;
  float one_minus_beta1;  // Adam and its kin
  float beta2;
  float one_minus_beta2;
  float inv_bias1;       // by the table's count: 1 / (1 - b1^t)
  float inv_sqrt_bias2;  // by the table's count: 1 / sqrt(1 - b2^t)
  double exact_beta1;    // for biases that are corrected row by row
  double exact_beta2;
  float momentum;  // SGD, RMSprop
  float one_minus_dampening;
  float alpha;  // RMSprop
  float one_minus_alpha;
  float l1;  // FTRL
  float twice_l2;
  float beta;
  float lamb_decay;  // LAMB's weight decay, a part of its direction
  bool counts_rows;  // a row's first or second scalar is its number of updates
  bool has_momentum;
  bool is_nesterov;
  bool is_centered;
  bool needs_preparation;   // one of what follows is asked for
  bool catches_up;          // decays for the updates that left a row out
  float clip_value;         // infinity: none
  float clip_norm;          // infinity: none
  float l2;                 // weight decay by the gradient
  float decay_factor;       // decoupled weight decay: 1 - lr * weight_decay
  float decay_before[2];    // the table's sum of logarithms as two floats, before this update
  float decay_after[2];     // and after it
  std::int64_t columns[3];  // float indexes of the fields of state in a record
  std::int64_t scalars[2];  // of the optimizer's own scalars
  std::int64_t log_decay;   // of the mark of catches_up among the scalars
};

/// How the results of an update are rounded to 16-bit weights. Filled by make_rounding_step.
struct RoundingStep {
  Rounding rounding;
  RowAddresses keys;     // a Key per row
  std::uint64_t stream;  // of random bits, of this update of this table
};

/// The number of floats that an update needs as scratch.
inline std::int64_t scratch_floats(std::int64_t dim, DType weight_dtype) {
  const std::int64_t gradient = (dim + 15) / 16 * 16;
  if (weight_dtype == DType::kFloat32) return gradient;
  return 2 * gradient + (dim + 31) / 32 * 16;  // the weights as floats, and random bits
}

/// The gradients of the rows of items [begin, end), sorted by row; the range starts and ends at row
/// borders. `scratch` has room for scratch_floats() floats, 64-byte aligned.
struct GradientArgs {
  std::int64_t dim;
  const GradItem* items;
  std::int64_t begin;
  std::int64_t end;
  const GradSource* sources;
  float* scratch;
};

/// Updates those rows. Set every field: zero has a meaning in each.
struct UpdateArgs : GradientArgs {
  UpdateArgs(const GradientArgs& gradients, const RowAddresses& rows, DType dtype,
             const RoundingStep& rounding_step, const OptimizerStep& optimizer_step)
      : GradientArgs(gradients),
        addresses(rows),
        weight_dtype(dtype),
        rounding(rounding_step),
        step(optimizer_step) {}

  RowAddresses addresses;
  DType weight_dtype;
  RoundingStep rounding;  // of 16-bit weights
  OptimizerStep step;
  std::uint64_t nonfinite = 0;  // out: rows whose summed gradient was not finite
};

/// Writes initial weights (not kCustom) of `count` rows: row i of keys[i] to the record rows[i],
/// or, with `rows` null, to out + i * dim.
struct InitializeArgs {
  const InitializerConfig* config;
  std::uint64_t seed;
  std::uint64_t table_hash;
  std::int64_t dim;
  const Key* keys;
  std::int64_t count;
  RowAddresses addresses;
  DType weight_dtype;  // of records
  const std::uint32_t* rows;
  float* out;
};

/// Copies weights of rows out: out[i * dim ...] (N, D).
struct GatherArgs {
  RowAddresses addresses;
  DType weight_dtype;
  std::int64_t dim;
  DefaultRows defaults;
  const RowNumber* rows;
  const Outcome* outcomes;
  std::int64_t begin;
  std::int64_t end;
  float* out;  // of key 0
};

/// Which shard of `num_shards`, 1 to 65,536, has each key: each owns a run of the virtual shards,
/// which are 2^bits.
struct OwnersArgs {
  const Key* keys;  // (N,)
  std::int64_t num_keys;
  std::uint64_t num_shards;
  int bits;
  std::uint16_t* owners;  // (N,)
};

/// Keys of one feature that go to two shards in their order, with the numbers of their bags if each
/// is one.
struct DealArgs {
  const Key* keys;              // (N,)
  const std::uint16_t* owners;  // (N,), 0 or 1
  std::int64_t num_keys;
  std::int32_t first_bag;   // the number of the first key's
  Key* keys_2[2];           // of each shard, as many as it has
  std::int32_t* bags_2[2];  // the number of each one's bag; null: those are not written
};

struct Kernels {
  const char* isa;
  void (*pool)(const PoolArgs&);
  void (*weights_grad)(const WeightsGradArgs&);
  void (*update)(UpdateArgs&);
  void (*initialize)(const InitializeArgs&);
  void (*gather)(const GatherArgs&);
  /// Counts the rows of items [begin, end) whose summed gradient is not finite; reads no row, and
  /// changes nothing but the scratch.
  std::uint64_t (*count_nonfinite)(const GradientArgs&);
  void (*owners)(const OwnersArgs&);
  void (*deal)(const DealArgs&);
};

/// The table of the chosen instruction set. Cheap. The first call throws what isa() throws.
const Kernels& kernels();

// One per compiled copy; only kernels() chooses among them.
extern const Kernels kKernelsBaseline;
extern const Kernels kKernelsAvx2;
extern const Kernels kKernelsAvx512;

}  // namespace recsdk::internal
