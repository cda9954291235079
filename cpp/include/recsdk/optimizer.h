// The optimizers that are fused into the backward pass. One update per touched key and backward,
// with the key's summed gradient.
#pragma once

#include <cstdint>

#include "recsdk/export.h"

namespace recsdk {

/// In the formulas, g is the summed gradient of a row (plus weight_decay * w where said), w its
/// weights, t the table's update count (1 in the first update), all element by element.
enum class OptimizerKind : std::uint8_t {
  /// w -= lr * g. As torch.optim.SGD without momentum.
  kSgd = 0,
  /// s += g * g; w -= lr / (1 + (t - 1) * lr_decay) * g / (sqrt(s) + eps). As torch.optim.Adagrad.
  kAdagrad = 1,
  /// s += mean(g * g) over the row; w -= (lr / (sqrt(s) + eps)) * g, s one number a row.
  /// As fbgemm's EXACT_ROWWISE_ADAGRAD and torchrec.optim.RowWiseAdagrad.
  kRowwiseAdagrad = 2,
  /// m = b1 * m + (1 - b1) * g; v = b2 * v + (1 - b2) * g * g;
  /// w -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps).
  /// As torch.optim.Adam, on touched rows.
  kAdam = 3,
};

/// Whose update count t corrects the bias of Adam.
enum class BiasCorrection : std::uint8_t {
  kTable = 0,  ///< the table's count, advanced by every update, an empty one too
  kRow = 1,    ///< a count kept per row, as a float in the state field "step", as torch keeps it
};

/// An optimizer and its hyperparameters. The defaults are those of the torch class.
/// Weight decay is L2 (added to g), on touched rows only.
struct RECSDK_API OptimizerConfig {
  OptimizerKind kind = OptimizerKind::kSgd;
  float learning_rate = 0.001F;  ///< 0.01 for Adagrad and rowwise Adagrad
  float eps = 1e-10F;            ///< 1e-8 for Adam
  // Double, since 1 - beta2 is what counts: of a float its fifth digit would be wrong.
  double beta1 = 0.9;                      ///< Adam
  double beta2 = 0.999;                    ///< Adam
  float lr_decay = 0.0F;                   ///< Adagrad
  float initial_accumulator_value = 0.0F;  ///< Adagrad, rowwise Adagrad
  float weight_decay = 0.0F;
  BiasCorrection bias_correction = BiasCorrection::kTable;  ///< Adam

  static OptimizerConfig sgd(float learning_rate = 0.001F);
  static OptimizerConfig adagrad(float learning_rate = 0.01F, float eps = 1e-10F);
  static OptimizerConfig rowwise_adagrad(float learning_rate = 0.01F, float eps = 1e-10F);
  static OptimizerConfig adam(float learning_rate = 0.001F, double beta1 = 0.9,
                              double beta2 = 0.999, float eps = 1e-8F);

  /// Throws std::invalid_argument if a field is out of range or not finite, or set though the kind
  /// does not use it (lr_decay, initial_accumulator_value, bias_correction).
  void validate() const;
};

/// What happens to a summed gradient that is infinite or not a number.
enum class NonFinite : std::uint8_t {
  kApply = 0,  ///< applied as torch does, and counted
  kRaise = 1,  ///< the update throws Error(kNonFinite) before it changes anything
  kSkip = 2,   ///< the key's update is left out, and counted
};

}  // namespace recsdk
