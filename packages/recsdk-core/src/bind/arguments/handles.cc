#include "arguments/handles.h"

#include <nanobind/stl/string.h>

#include "arguments/calls.h"
#include "arguments/refusals.h"

namespace recsdk::bind {
PyBags::PyBags(nb::handle rows, nb::handle outcomes_object, nb::handle offsets, nb::handle weights,
               nb::handle pooling)
    : rows_(rows, "rows"),
      offsets_(Integers::if_given(offsets, "offsets")),
      framework_(rows_.framework()) {
  for (const nb::handle object : {rows, outcomes_object, offsets, weights})
    kept_.push_back(nb::borrow(object));
  bags_.rows = rows_.span();
  const std::int64_t n = num_keys();
  outcomes_ = outcomes(outcomes_object, "outcomes", n);
  bags_.outcomes = {static_cast<const Outcome*>(outcomes_.data), bags_.rows.size()};
  if (!offsets.is_none()) require_some_offsets(offsets_.span());
  bags_.offsets = offsets_.span();
  if (!weights.is_none()) {
    weights_ = floats(weights, "weights", n);
    bags_.weights = {float_data(weights_), bags_.rows.size()};
  }
  bags_.pooling = pooling_of(pooling);
}

const Bags& PyBags::get() const {
  rows_.require_unmoved();
  require_unmoved(outcomes_);
  offsets_.require_unmoved();
  require_unmoved(weights_);
  return bags_;
}

Pooling pooling_of(nb::handle name) {
  std::string text;
  if (nb::try_cast(name, text)) {
    if (text == "sum") return Pooling::kSum;
    if (text == "mean") return Pooling::kMean;
  }
  throw nb::value_error(("pooling must be 'sum' or 'mean', got " + shown(name)).c_str());
}

const Lease* lease_of(nb::handle object) {
  if (object.is_none()) return nullptr;
  if (!nb::isinstance<PyLease>(object))
    throw nb::type_error(
        ("lease must be a recsdk_core.Lease or None, got " + shown(object)).c_str());
  const Lease& lease = nb::inst_ptr<PyLease>(object)->get();
  if (lease.is_released()) throw nb::value_error("lease is released; take a new one with lease()");
  return &lease;
}

const PyBags& bags_of(nb::handle object) {
  if (!nb::isinstance<PyBags>(object))
    throw nb::type_error(("bags must be recsdk_core.Bags, got " + shown(object)).c_str());
  return *nb::inst_ptr<PyBags>(object);
}

PyTable& table_of(nb::handle table) {
  if (nb::isinstance<PyTable>(table)) return *nb::inst_ptr<PyTable>(table);
  const nb::object engine = nb::getattr(table, "_engine", nb::none());
  if (!nb::isinstance<PyTable>(engine))
    throw nb::type_error(
        ("each call must start with a recsdk_core.Table, got " + shown(table)).c_str());
  return *nb::inst_ptr<PyTable>(engine);
}

namespace {

Index* index_if_any(nb::handle object) {
  nb::object engine = nb::getattr(object, "_engine", nb::borrow(object));
  if (nb::isinstance<PyTable>(engine)) return &(*nb::inst_ptr<PyTable>(engine))->index();
  if (nb::isinstance<PyIndex>(engine)) return &**nb::inst_ptr<PyIndex>(engine);
  return nullptr;
}

}  // namespace

Index& index_of(nb::handle object) {
  if (Index* const index = index_if_any(object)) return *index;
  throw nb::type_error(
      ("each call must start with a recsdk_core.Table or Index, got " + shown(object)).c_str());
}

std::vector<Index*> indexes_of(const nb::tuple& tables) {
  std::vector<Index*> found;
  for (const nb::handle table : tables) {
    found.push_back(index_if_any(table));
    if (found.back() == nullptr)
      throw nb::type_error(
          ("tables must be of recsdk_core.Table or Index, got " + shown(table)).c_str());
  }
  return found;
}

}  // namespace recsdk::bind
