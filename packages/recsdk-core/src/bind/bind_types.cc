// types.h: Outcome has its Python form in recsdk_core.outcome, checked here to be the same.
#include "recsdk/types.h"

#include "bindings.h"

namespace recsdk::bind {

void bind_types(nb::module_& module) {
  nb::dict outcomes;
  outcomes["FOUND"] = static_cast<int>(Outcome::kFound);
  outcomes["INSERTED"] = static_cast<int>(Outcome::kInserted);
  outcomes["REFUSED"] = static_cast<int>(Outcome::kRefused);
  outcomes["MISSING"] = static_cast<int>(Outcome::kMissing);
  outcomes["OVERFLOWED"] = static_cast<int>(Outcome::kOverflowed);
  outcomes["NOT_ADMITTED"] = static_cast<int>(Outcome::kNotAdmitted);
  module.attr("OUTCOMES") = outcomes;
}

}  // namespace recsdk::bind
