// optimizer.h
#include "recsdk/optimizer.h"

#include <nanobind/stl/optional.h>

#include "bindings.h"

namespace recsdk::bind {

void bind_optimizer(nb::module_& module) {
  nb::enum_<OptimizerKind>(module, "OptimizerKind")
      .value("SGD", OptimizerKind::kSgd)
      .value("ADAGRAD", OptimizerKind::kAdagrad)
      .value("ROWWISE_ADAGRAD", OptimizerKind::kRowwiseAdagrad)
      .value("ADAM", OptimizerKind::kAdam)
      .value("PARTIAL_ROWWISE_ADAM", OptimizerKind::kPartialRowwiseAdam)
      .value("LAMB", OptimizerKind::kLamb)
      .value("FTRL", OptimizerKind::kFtrl)
      .value("RMSPROP", OptimizerKind::kRmsprop);
  nb::enum_<BiasCorrection>(module, "BiasCorrection")
      .value("TABLE", BiasCorrection::kTable)
      .value("ROW", BiasCorrection::kRow);
  nb::enum_<WeightDecay>(module, "WeightDecay")
      .value("L2", WeightDecay::kL2)
      .value("DECOUPLED", WeightDecay::kDecoupled);
  nb::enum_<Rounding>(module, "Rounding")
      .value("STOCHASTIC", Rounding::kStochastic)
      .value("NEAREST", Rounding::kNearest);
  nb::enum_<NonFinite>(module, "NonFinite")
      .value("APPLY", NonFinite::kApply)
      .value("RAISE", NonFinite::kRaise)
      .value("SKIP", NonFinite::kSkip);
  nb::class_<OptimizerConfig>(module, "OptimizerConfig")
      .def(nb::init<>())
      .def_rw("kind", &OptimizerConfig::kind)
      .def_rw("learning_rate", &OptimizerConfig::learning_rate)
      .def_rw("eps", &OptimizerConfig::eps)
      .def_rw("beta1", &OptimizerConfig::beta1)
      .def_rw("beta2", &OptimizerConfig::beta2)
      .def_rw("lr_decay", &OptimizerConfig::lr_decay)
      .def_rw("initial_accumulator_value", &OptimizerConfig::initial_accumulator_value)
      .def_rw("weight_decay", &OptimizerConfig::weight_decay)
      .def_rw("bias_correction", &OptimizerConfig::bias_correction)
      .def_rw("weight_decay_mode", &OptimizerConfig::weight_decay_mode)
      .def_rw("catch_up", &OptimizerConfig::catch_up)
      .def_rw("clip_value", &OptimizerConfig::clip_value, nb::arg("value").none())
      .def_rw("clip_norm", &OptimizerConfig::clip_norm, nb::arg("value").none())
      .def_rw("momentum", &OptimizerConfig::momentum)
      .def_rw("dampening", &OptimizerConfig::dampening)
      .def_rw("nesterov", &OptimizerConfig::nesterov)
      .def_rw("alpha", &OptimizerConfig::alpha)
      .def_rw("centered", &OptimizerConfig::centered)
      .def_rw("l1", &OptimizerConfig::l1)
      .def_rw("l2", &OptimizerConfig::l2)
      .def_rw("beta", &OptimizerConfig::beta);
}

}  // namespace recsdk::bind
