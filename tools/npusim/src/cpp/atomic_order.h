// Operators whose device kernels add atomically: no order is promised where positions repeat.
#pragma once

#include <ATen/core/ivalue.h>

#include <string>

namespace npusim {

/// Changes an operator's arguments, CPU tensors, so that items of equal positions come in a random
/// order. Does nothing for operators that promise an order.
void shuffle_repeated_positions(const std::string& name, c10::IValue* arguments);

}  // namespace npusim
