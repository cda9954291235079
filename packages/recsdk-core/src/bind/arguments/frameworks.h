// What array arguments and results need of numpy and torch: their objects, looked up once. Torch is
// never imported from here.
#pragma once

#include <nanobind/nanobind.h>

#include "arguments/dlpack_exchange.h"

namespace recsdk::bind {

namespace nb = nanobind;

/// Interned names of attributes.
struct Names {
  nb::object array_struct, is_cpu, is_neg, dtype, data_ptr, shape, stride, numel;
};

struct Numpy {
  nb::object ndarray, empty, float32, int32, int64, uint8;
};

struct Torch {
  nb::object tensor, empty, float32, int32, int64, uint8, uint64;
  const dlpack::ExchangeApi* exchange;  // null: this torch has none
};

// Made once and never freed: the interpreter may be gone before static destructors run.
extern Names* names;
extern Numpy* numpy;
extern Torch* torch;  ///< null until `torch_if_imported` has found it

/// Looks up numpy's objects and interns names. Called once, when the module is made.
void init_frameworks();

/// Torch's objects, or null while the process has not imported torch.
const Torch* torch_if_imported();

bool is_instance(nb::handle object, const nb::object& type);
nb::object attribute(nb::handle object, const nb::object& name);
nb::object call_method(nb::handle object, const nb::object& name);

}  // namespace recsdk::bind
