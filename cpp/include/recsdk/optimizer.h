// The optimizers that are fused into the backward pass. Each backward updates each touched row
// once, with the summed gradient of its key.
#pragma once

#include <cstdint>
#include <optional>

#include "recsdk/export.h"

namespace recsdk {

/// In the formulas, g is the summed gradient of a row, after clipping and L2 weight decay if these
/// are set, w its weights, t the table's update count (1 in the first update), all element by
/// element.
enum class OptimizerKind : std::uint8_t {
  /// w -= lr * g; with momentum b = momentum * b + (1 - dampening) * g, where the first gradient of
  /// a row is taken whole, and w -= lr * b, or with nesterov w -= lr * (g + momentum * b).
  /// As torch.optim.SGD.
  kSgd = 0,
  /// s += g * g; w -= lr / (1 + (t - 1) * lr_decay) * g / (sqrt(s) + eps). As torch.optim.Adagrad.
  kAdagrad = 1,
  /// s += mean(g * g) over the row; w -= (lr / (sqrt(s) + eps)) * g, s one number a row.
  /// As fbgemm's EXACT_ROWWISE_ADAGRAD and torchrec.optim.RowWiseAdagrad.
  kRowwiseAdagrad = 2,
  /// m = b1 * m + (1 - b1) * g; v = b2 * v + (1 - b2) * g * g;
  /// w -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps).
  /// As torch.optim.Adam on touched rows; with decoupled weight decay as torch.optim.AdamW.
  kAdam = 3,
  /// As kAdam, but v is one number a row: v = b2 * v + (1 - b2) * mean(g * g).
  /// As fbgemm's PARTIAL_ROWWISE_ADAM, whose weight decay is decoupled.
  kPartialRowwiseAdam = 4,
  /// m and v as kAdam; r = m / (1 - b1^t) / (sqrt(v) / sqrt(1 - b2^t) + eps) + weight_decay * w;
  /// w -= lr * |w| / |r| * r, where the ratio is 1 if a length is 0. As fbgemm's LAMB.
  /// Source: Y. You et al., "Large Batch Optimization for Deep Learning", ICLR 2020.
  kLamb = 5,
  /// z += g - (sqrt(n + g * g) - sqrt(n)) / lr * w; n += g * g; w = 0 where |z| <= l1, else
  /// (sign(z) * l1 - z) / ((beta + sqrt(n)) / lr + 2 * l2). As TensorFlow's Ftrl. With lr 0 rows
  /// stay as they are, state included.
  /// Source: H. B. McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013.
  kFtrl = 6,
  /// s = alpha * s + (1 - alpha) * g * g; u = g / (sqrt(s) + eps), or with centered
  /// c = alpha * c + (1 - alpha) * g; u = g / (sqrt(s - c * c) + eps); w -= lr * u, or with
  /// momentum
  /// b = momentum * b + u; w -= lr * b. As torch.optim.RMSprop.
  kRmsprop = 7,
};

/// Whose update count t corrects the bias of Adam, partial rowwise Adam and LAMB.
enum class BiasCorrection : std::uint8_t {
  kTable = 0,  ///< the table's count, advanced by every update, an empty one too
  kRow = 1,    ///< a count kept per row, as a float in the state field "step", as torch keeps it
};

/// How weights decay.
enum class WeightDecay : std::uint8_t {
  kL2 = 0,         ///< weight_decay * w is added to g
  kDecoupled = 1,  ///< w is multiplied by 1 - lr * weight_decay before the update
};

/// An optimizer and its hyperparameters. The defaults of the factories below are the torch class's;
/// those of partial rowwise Adam and LAMB are fbgemm's, those of FTRL TensorFlow's.
struct RECSDK_API OptimizerConfig {
  OptimizerKind kind = OptimizerKind::kSgd;
  float learning_rate = 0.001F;  ///< the factories': 0.01 but for SGD, Adam, FTRL
  float eps = 1e-10F;            ///< the factories' of Adam and its kin, and RMSprop: 1e-8
  // Double where one minus the number counts: with a float its fifth digit would be wrong.
  double beta1 = 0.9;                      ///< Adam and its kin
  double beta2 = 0.999;                    ///< Adam and its kin
  float lr_decay = 0.0F;                   ///< Adagrad
  float initial_accumulator_value = 0.0F;  ///< Adagrad, rowwise Adagrad; FTRL, by default 0.1
  BiasCorrection bias_correction = BiasCorrection::kTable;  ///< Adam and its kin
  float momentum = 0.0F;                                    ///< SGD, RMSprop
  double dampening = 0.0;                                   ///< SGD with momentum
  bool nesterov = false;                                    ///< SGD with momentum, no dampening
  double alpha = 0.99;                                      ///< RMSprop
  bool centered = false;                                    ///< RMSprop
  float l1 = 0.0F;                                          ///< FTRL: l1_regularization_strength
  float l2 = 0.0F;                                          ///< FTRL: l2_regularization_strength
  float beta = 0.0F;                                        ///< FTRL

  /// Acts on a row only when it is touched. LAMB has a way of its own; FTRL has none.
  float weight_decay = 0.0F;
  WeightDecay weight_decay_mode = WeightDecay::kL2;
  /// When a row is touched, first multiplies its weights by 1 - lr * weight_decay for each update
  /// since its last one that left it out, with the learning rate of that update. Readers see rows
  /// as stored, without the decay that they have yet to catch up. Needs lr * weight_decay < 1, and
  /// decoupled weight decay or SGD without momentum: otherwise an update without a gradient is no
  /// product, or changes more than weights.
  bool catch_up = false;

  /// First limits each element of the summed gradient to +-clip_value; > 0; absent: no limit.
  std::optional<float> clip_value;
  /// Then scales it down to an Euclidean norm of clip_norm over the row; > 0; absent: no limit.
  std::optional<float> clip_norm;

  static OptimizerConfig sgd(float learning_rate = 0.001F);
  static OptimizerConfig adagrad(float learning_rate = 0.01F, float eps = 1e-10F);
  static OptimizerConfig rowwise_adagrad(float learning_rate = 0.01F, float eps = 1e-10F);
  static OptimizerConfig adam(float learning_rate = 0.001F, double beta1 = 0.9,
                              double beta2 = 0.999, float eps = 1e-8F);
  /// adam with decoupled weight decay.
  static OptimizerConfig adamw(float learning_rate = 0.001F, float weight_decay = 0.01F);
  /// With decoupled weight decay, as fbgemm's.
  static OptimizerConfig partial_rowwise_adam(float learning_rate = 0.01F, double beta1 = 0.9,
                                              double beta2 = 0.999, float eps = 1e-8F);
  static OptimizerConfig lamb(float learning_rate = 0.01F, double beta1 = 0.9, double beta2 = 0.999,
                              float eps = 1e-8F);
  static OptimizerConfig ftrl(float learning_rate = 0.001F);
  static OptimizerConfig rmsprop(float learning_rate = 0.01F, double alpha = 0.99,
                                 float eps = 1e-8F);

  /// Throws std::invalid_argument if a field is out of range or not finite, or set though the kind
  /// does not use it. What eps, beta1, beta2 and alpha are is not looked at where they are not
  /// used, as long as they are in range.
  void validate() const;
};

/// How an update makes 16-bit weights from what it computes in float32.
enum class Rounding : std::uint8_t {
  /// To one of the two neighbours, more likely the nearer one, so small changes count on average.
  /// The random bits are a function of (seed, table, key, column, t).
  kStochastic = 0,
  kNearest = 1,  ///< to the nearest, ties to even
};

/// What happens to a summed gradient that is infinite or not a number.
enum class NonFinite : std::uint8_t {
  kApply = 0,  ///< applied as torch does, and counted
  kRaise = 1,  ///< the update throws Error(kNonFinite) before it changes anything
  kSkip = 2,   ///< the key's update is left out, and counted
};

}  // namespace recsdk
