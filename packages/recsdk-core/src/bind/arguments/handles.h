// What Python holds of the engine: each handle lets go of the GIL before it waits for a lock.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "arguments/array.h"
#include "arguments/busy.h"
#include "arguments/checked.h"
#include "arguments/gil.h"
#include "recsdk/checkpoint.h"
#include "recsdk/leavers.h"
#include "recsdk/table.h"

namespace recsdk::bind {

/// A lease. Its end waits for the table's lock, whose holder may wait for the GIL.
class PyLease {
 public:
  explicit PyLease(Lease lease) : lease_(std::move(lease)) {}
  PyLease(PyLease&&) noexcept = default;
  PyLease& operator=(PyLease&&) = delete;
  ~PyLease() {
    if (lease_.is_released()) return;
    end_handle(lease_);
    note_ended();
  }

  void release() {
    if (lease_.is_released()) return;
    const WithoutGil without_gil;
    release_without_gil();
  }
  void release_without_gil() noexcept {
    lease_.release();
    note_ended();
  }
  const Lease& get() const { return lease_; }

 private:
  Lease lease_;
};

/// What leaves a table. Its end may wait for who fills or reads it.
class PyLeavers {
 public:
  PyLeavers(Leavers leavers, std::int64_t dim, std::int64_t state_width)
      : leavers_(std::move(leavers)), dim_(dim), state_width_(state_width) {}
  PyLeavers(PyLeavers&&) noexcept = default;
  PyLeavers& operator=(PyLeavers&&) = delete;
  ~PyLeavers() {
    if (!leavers_) return;
    const WithoutGil without_gil;
    leavers_.reset();
  }

  Leavers& get() { return *leavers_; }
  std::int64_t dim() const { return dim_; }
  std::int64_t state_width() const { return state_width_; }

 private:
  std::optional<Leavers> leavers_;
  std::int64_t dim_;
  std::int64_t state_width_;
};

/// Lets go of a Python object that threads without the GIL may drop.
void release_python(nb::object* held);

/// The rows of an index, made by function(keys, rows) on arrays of Python's own. If the function is
/// an object with a method norms(rows), that takes their norms; one with check(keys) raises for
/// keys whose initial rows could not be read.
class PythonMaker : public RowMaker {
 public:
  explicit PythonMaker(nb::object python_function);
  void make(const NewRows& added) override;
  bool checks() const override { return checks_; }
  void check(std::span<const Key> keys) override;
  bool has_norms() const override { return has_norms_; }
  void norms(std::span<const std::uint32_t> rows, std::span<float> found) const override;
  nb::object* function() const { return function_.get(); }

 private:
  std::shared_ptr<nb::object> function_;
  bool has_norms_;
  bool checks_;
};

/// An index. Giving its memory back takes a while.
class PyIndex {
 public:
  PyIndex(IndexConfig config, std::shared_ptr<PythonMaker> maker)
      : maker_(std::move(maker)), index_(std::in_place, std::move(config), maker_) {}
  PyIndex(const PyIndex&) = delete;
  ~PyIndex() {
    const WithoutGil without_gil;
    index_.reset();
  }

  Index& operator*() { return *index_; }
  Index* operator->() { return &*index_; }
  /// The Python function that makes its rows, or null; see FunctionSlots.
  nb::object* function() const { return maker_ == nullptr ? nullptr : maker_->function(); }

 private:
  std::shared_ptr<PythonMaker> maker_;
  std::optional<Index> index_;
};

/// A cut of an index. Its end waits for the index's lock, whose holder may wait for the GIL.
class PyIndexCut {
 public:
  explicit PyIndexCut(IndexCut cut) : cut_(std::move(cut)) {}
  PyIndexCut(PyIndexCut&&) noexcept = default;
  PyIndexCut& operator=(PyIndexCut&&) = delete;
  ~PyIndexCut() {
    if (cut_) end_handle(*cut_);
  }
  void finish(bool durable) {
    const WithoutGil without_gil;
    cut_->finish(durable);
  }
  const IndexCut* operator->() const { return &*cut_; }

 private:
  std::optional<IndexCut> cut_;
};

/// A custom initializer: calls function(keys, values) on arrays of Python's own, so that it may
/// keep them. Threads without the GIL may copy and drop it.
struct PythonInitializer {
  PythonInitializer(nb::object python_function, std::int64_t row_width);
  void operator()(std::span<const Key> keys, float* values) const;

  std::shared_ptr<nb::object> function;
  std::int64_t dim;
};

/// A table. Giving its memory back takes a while.
class PyTable {
 public:
  explicit PyTable(TableConfig config) : table_(std::move(config)) {}
  PyTable(const PyTable&) = delete;
  ~PyTable() {
    const WithoutGil without_gil;
    table_.reset();
  }

  Table& operator*() { return *table_; }
  Table* operator->() { return &*table_; }
  /// The Python function that makes its rows, or null; see FunctionSlots.
  nb::object* function() const {
    const auto* custom = table_->config().initializer.callback.target<PythonInitializer>();
    return custom == nullptr ? nullptr : custom->function.get();
  }

 private:
  std::optional<Table> table_;
};

/// Shows Python's garbage collector the function of a handle: it may refer to what refers to the
/// handle.
template <typename Handle>
struct FunctionSlots {
  static int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (!nb::inst_ready(self)) return 0;
    const nb::object* function = nb::inst_ptr<Handle>(self)->function();
    if (function != nullptr) Py_VISIT(function->ptr());
    return 0;
  }
  static int clear(PyObject* self) {
    nb::object* function = nb::inst_ptr<Handle>(self)->function();
    if (function != nullptr) *function = nb::none();
    return 0;
  }
  static inline PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                                       {Py_tp_clear, reinterpret_cast<void*>(clear)},
                                       {0, nullptr}};
};

/// A cut. Its end waits for the table's locks, whose holder may wait for the GIL.
class PyCut {
 public:
  explicit PyCut(Cut cut) : cut_(std::move(cut)) {}
  PyCut(PyCut&&) noexcept = default;
  PyCut& operator=(PyCut&&) = delete;
  ~PyCut() {
    if (cut_) end_handle(*cut_);
  }
  Cut& operator*() { return *cut_; }
  const Cut* operator->() const { return &*cut_; }

 private:
  std::optional<Cut> cut_;
};

/// Mapped bags, their arrays checked once and kept alive.
class PyBags {
 public:
  PyBags(nb::handle rows, nb::handle outcomes, nb::handle offsets, nb::handle weights,
         nb::handle pooling);

  /// Checks that no array was resized since. Throws ValueError if one was.
  const Bags& get() const;
  Framework framework() const { return framework_; }
  std::int64_t num_bags() const { return bags_.num_bags(); }
  std::int64_t num_keys() const { return static_cast<std::int64_t>(bags_.rows.size()); }

 private:
  std::vector<nb::object> kept_;
  Integers rows_;
  Array outcomes_;
  Integers offsets_;
  Array weights_;
  Framework framework_;
  Bags bags_;
};

/// "sum" or "mean".
Pooling pooling_of(nb::handle name);

/// The lease behind None or a PyLease. Throws TypeError for anything else, ValueError if it is
/// released.
const Lease* lease_of(nb::handle lease);

/// The bags that an argument is. Throws TypeError for anything else.
const PyBags& bags_of(nb::handle bags);

/// The engine's table behind a recsdk_core.Table.
PyTable& table_of(nb::handle table);

/// The index behind a recsdk_core.Index or Table.
Index& index_of(nb::handle object);

/// Those of the argument `tables`, which keeps them. Throws TypeError for anything else.
std::vector<Index*> indexes_of(const nb::tuple& tables);

}  // namespace recsdk::bind
