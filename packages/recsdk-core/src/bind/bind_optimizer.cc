// optimizer.h
#include "recsdk/optimizer.h"

#include "bindings.h"

namespace recsdk::bind {

void bind_optimizer(nb::module_& module) {
  nb::enum_<OptimizerKind>(module, "OptimizerKind")
      .value("SGD", OptimizerKind::kSgd)
      .value("ADAGRAD", OptimizerKind::kAdagrad)
      .value("ROWWISE_ADAGRAD", OptimizerKind::kRowwiseAdagrad)
      .value("ADAM", OptimizerKind::kAdam);
  nb::enum_<BiasCorrection>(module, "BiasCorrection")
      .value("TABLE", BiasCorrection::kTable)
      .value("ROW", BiasCorrection::kRow);
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
      .def_rw("bias_correction", &OptimizerConfig::bias_correction);
}

}  // namespace recsdk::bind
