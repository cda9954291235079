// The contract of a device, backends/backend.h, held against every backend.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "backends/backend.h"
#include "device_test_support.h"

namespace recsdk::test::device_conformance_test {
namespace {

using internal::CurrentDevice;
using internal::Device;
using internal::DeviceBuffer;
using internal::DeviceEvent;
using internal::DeviceMatrix;
using internal::DeviceStream;
using internal::PinnedBuffer;
using internal::UpdateRows;
using internal::UpdateStep;

class Conformance : public DeviceTest {};

INSTANTIATE_TEST_SUITE_P(Backends, Conformance, ::testing::ValuesIn(device_cases()), name_of);

TEST_P(Conformance, MemoryIsAlignedAndDistinct) {
  const std::shared_ptr<Device> device = open();
  const CurrentDevice current(*device);
  std::vector<DeviceBuffer> buffers;
  std::vector<PinnedBuffer> pinned;
  std::set<const void*> starts;
  for (const std::size_t bytes : {1U, 63U, 64U, 4096U, 100000U}) {
    buffers.emplace_back(*device, bytes);
    pinned.emplace_back(*device, bytes);
    starts.insert(buffers.back().data());
    starts.insert(pinned.back().data());
  }
  EXPECT_EQ(starts.size(), 10U);
  for (const void* const start : starts)
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(start) % internal::kDeviceAlignment, 0U);
}

TEST_P(Conformance, CopiesGoUpAndComeBack) {
  const std::shared_ptr<Device> device = open();
  const CurrentDevice current(*device);
  Copies copies(*device);
  Noise noise(1);
  for (const std::int64_t count : {1, 7, 16, 1000, 40000}) {
    const std::vector<float> values = noise.values(count);
    const DeviceBuffer memory = copies.up(values);
    EXPECT_EQ(copies.down(memory.as<float>(), count), values);
  }
}

TEST_P(Conformance, PinnedMemoryIsFreeAgainAfterItsEvent) {
  const std::shared_ptr<Device> device = open();
  const CurrentDevice current(*device);
  const std::unique_ptr<DeviceStream> stream = device->make_stream();
  const std::unique_ptr<DeviceEvent> copied = device->make_event();
  const PinnedBuffer pinned(*device, 4);
  std::vector<DeviceBuffer> memory;
  for (int i = 0; i < 5; ++i) {
    copied->synchronize();  // of no record, or the last one
    *pinned.as<float>() = static_cast<float>(i);
    memory.emplace_back(*device, 4);
    stream->copy_to_device(memory.back().data(), pinned.data(), 4);
    stream->record(*copied);
  }
  stream->synchronize();
  Copies copies(*device);
  for (int i = 0; i < 5; ++i) {
    const std::vector<float> got = copies.down(memory[static_cast<std::size_t>(i)].as<float>(), 1);
    EXPECT_EQ(got[0], static_cast<float>(i));
  }
}

TEST_P(Conformance, GathersAndScattersRowsOfAnyWidth) {
  const std::shared_ptr<Device> device = open();
  const CurrentDevice current(*device);
  Copies copies(*device);
  const std::unique_ptr<DeviceStream> stream = device->make_stream();
  Noise noise(2);
  for (const std::int64_t width : {1, 3, 8, 33, 128}) {
    const std::int64_t num_rows = 50;
    std::vector<float> model = noise.values(num_rows * width);
    const DeviceBuffer memory = copies.up(model);
    const DeviceMatrix table{memory.as<float>(), num_rows, width};

    const std::vector<std::int64_t> written = {49, 0, 7, 31};
    const std::vector<float> values = noise.values(4 * width);
    for (std::size_t i = 0; i < written.size(); ++i)
      std::copy_n(values.data() + static_cast<std::int64_t>(i) * width, width,
                  model.data() + written[i] * width);
    const DeviceBuffer written_rows = copies.up(written);
    const DeviceBuffer new_values = copies.up(values);
    stream->scatter(table, written_rows.as<std::int64_t>(), 4, new_values.as<float>());

    const std::vector<std::int64_t> read = {7, 7, 49, 1, 0, 7};
    std::vector<float> wanted;
    for (const std::int64_t row : read)
      wanted.insert(wanted.end(), model.begin() + row * width, model.begin() + (row + 1) * width);
    const DeviceBuffer read_rows = copies.up(read);
    const DeviceBuffer out(*device, wanted.size() * sizeof(float));
    stream->gather(table, read_rows.as<std::int64_t>(), 6, out.as<float>());
    stream->synchronize();
    EXPECT_EQ(copies.down(out.as<float>(), 6 * width), wanted);
    EXPECT_EQ(copies.down(memory.as<float>(), num_rows * width), model);
  }
}

TEST_P(Conformance, AddsMatrices) {
  const std::shared_ptr<Device> device = open();
  const CurrentDevice current(*device);
  Copies copies(*device);
  Noise noise(3);
  const std::vector<float> a = noise.values(70);
  const std::vector<float> b = noise.values(35);
  std::vector<float> wanted = a;
  for (std::size_t i = 0; i < b.size(); ++i) wanted[i] += b[i];
  const DeviceBuffer sum = copies.up(a);
  const DeviceBuffer addend = copies.up(b);
  const std::unique_ptr<DeviceStream> stream = device->make_stream();
  stream->add(sum.as<float>(), addend.as<float>(), 5, 7);  // only the first five rows
  stream->synchronize();
  EXPECT_EQ(copies.down(sum.as<float>(), 70), wanted);
}

// Memory is used again by later work at once, and each sees what was before it.
TEST_P(Conformance, WorkOfAStreamIsDoneInOrder) {
  const std::shared_ptr<Device> device = open();
  const CurrentDevice current(*device);
  Copies copies(*device);
  const std::unique_ptr<DeviceStream> stream = device->make_stream();
  const DeviceBuffer table = copies.up(std::vector<float>(32, 1.0F));
  const DeviceMatrix matrix{table.as<float>(), 8, 4};
  const DeviceBuffer rows = copies.up(std::vector<std::int64_t>{2, 5});
  const DeviceBuffer taken(*device, 32);
  for (int i = 0; i < 10; ++i) {
    stream->gather(matrix, rows.as<std::int64_t>(), 2, taken.as<float>());
    stream->add(taken.as<float>(), taken.as<float>(), 2, 4);
    stream->scatter(matrix, rows.as<std::int64_t>(), 2, taken.as<float>());
  }
  stream->synchronize();
  const std::vector<float> got = copies.down(table.as<float>(), 32);
  for (std::size_t i = 0; i < got.size(); ++i)
    EXPECT_EQ(got[i], i / 4 == 2 || i / 4 == 5 ? 1024.0F : 1.0F);
}

TEST_P(Conformance, AStreamWaitsForAnEventOfAnother) {
  const std::shared_ptr<Device> device = open();
  const CurrentDevice current(*device);
  Copies copies(*device);
  const std::unique_ptr<DeviceStream> first = device->make_stream();
  const std::unique_ptr<DeviceStream> second = device->make_stream();
  const std::unique_ptr<DeviceEvent> event = device->make_event();
  const DeviceBuffer table = copies.up(std::vector<float>(4, 1.0F));
  const DeviceMatrix matrix{table.as<float>(), 1, 4};
  const DeviceBuffer rows = copies.up(std::vector<std::int64_t>{0});
  const DeviceBuffer out(*device, 16);
  for (int round = 1; round <= 3; ++round) {  // the event is recorded again and again
    first->add(table.as<float>(), table.as<float>(), 1, 4);
    first->record(*event);
    second->wait(*event);
    second->gather(matrix, rows.as<std::int64_t>(), 1, out.as<float>());
    second->synchronize();
    EXPECT_EQ(copies.down(out.as<float>(), 4), std::vector<float>(4, std::ldexp(1.0F, round)));
  }
}

TEST_P(Conformance, NoRowsAreNoWork) {
  const std::shared_ptr<Device> device = open();
  const CurrentDevice current(*device);
  const std::unique_ptr<DeviceStream> stream = device->make_stream();
  const DeviceBuffer table(*device, 64);
  const DeviceMatrix matrix{table.as<float>(), 4, 4};
  stream->gather(matrix, nullptr, 0, nullptr);
  stream->scatter(matrix, nullptr, 0, nullptr);
  stream->add(nullptr, nullptr, 0, 4);
  stream->update({}, {});
  stream->copy_to_device(table.data(), nullptr, 0);
  stream->copy_to_host(nullptr, table.data(), 0);
  stream->synchronize();
}

TEST_P(Conformance, AnyThreadMayUseIt) {
  const std::shared_ptr<Device> device = open();
  const CurrentDevice current(*device);
  Copies copies(*device);
  const DeviceBuffer memory = copies.up(std::vector<float>{1.0F, 2.0F});
  std::vector<float> got;
  std::thread([&] {
    const CurrentDevice outer(*device);
    const CurrentDevice inner(*device);  // they nest
    got = Copies(*device).down(memory.as<float>(), 2);
  }).join();
  EXPECT_EQ(got, (std::vector<float>{1.0F, 2.0F}));
}

// ---- optimizers, against their formulas in double precision ------------------------------------

struct Matrices {
  std::vector<float> gradients;
  std::vector<float> weights;
  std::vector<float> first;
  std::vector<float> second;
};

struct Numbers {
  double weight;
  double first;
  double second;
};

Numbers by_formula(const UpdateStep& step, double g, Numbers now, double mean_square) {
  g += static_cast<double>(step.l2) * now.weight;
  now.weight *= static_cast<double>(step.decay_factor);
  const double lr = static_cast<double>(step.learning_rate);
  const double eps = static_cast<double>(step.eps);
  switch (step.kind) {
    case OptimizerKind::kAdagrad:
      now.first += g * g;
      now.weight -= lr * g / (std::sqrt(now.first) + eps);
      break;
    case OptimizerKind::kRowwiseAdagrad:
      now.first += mean_square;
      now.weight -= lr * g / (std::sqrt(now.first) + eps);
      break;
    case OptimizerKind::kAdam:
      now.first = now.first * static_cast<double>(step.beta1) +
                  static_cast<double>(step.one_minus_beta1) * g;
      now.second = now.second * static_cast<double>(step.beta2) +
                   static_cast<double>(step.one_minus_beta2) * g * g;
      now.weight -=
          lr * now.first / (std::sqrt(now.second) * static_cast<double>(step.inv_sqrt_bias2) + eps);
      break;
    default:
      if (step.has_momentum) {
        now.first = now.first * static_cast<double>(step.momentum) + g;
        g = step.is_nesterov ? g + static_cast<double>(step.momentum) * now.first : now.first;
      }
      now.weight -= lr * g;
  }
  return now;
}

Matrices updated_by_formula(const UpdateStep& step, Matrices m, std::int64_t dim) {
  const bool is_rowwise = step.kind == OptimizerKind::kRowwiseAdagrad;
  const auto width = static_cast<std::size_t>(dim);
  for (std::size_t row = 0; row * width < m.weights.size(); ++row) {
    double mean_square = 0.0;
    for (std::size_t c = 0; c < width; ++c) {
      const double g = static_cast<double>(m.gradients[row * width + c]);
      mean_square += g * g / static_cast<double>(dim);
    }
    double row_state = 0.0;
    for (std::size_t c = 0; c < width; ++c) {
      const std::size_t i = row * width + c;
      const Numbers before{static_cast<double>(m.weights[i]),
                           static_cast<double>(m.first[is_rowwise ? row : i]),
                           static_cast<double>(m.second[i])};
      const Numbers after =
          by_formula(step, static_cast<double>(m.gradients[i]), before, mean_square);
      m.weights[i] = static_cast<float>(after.weight);
      m.second[i] = static_cast<float>(after.second);
      row_state = after.first;
      if (!is_rowwise) m.first[i] = static_cast<float>(after.first);
    }
    if (is_rowwise) m.first[row] = static_cast<float>(row_state);
  }
  return m;
}

std::vector<UpdateStep> steps() {
  UpdateStep sgd{.kind = OptimizerKind::kSgd, .learning_rate = 0.1F};
  UpdateStep momentum = sgd;
  momentum.has_momentum = true;
  momentum.momentum = 0.9F;
  UpdateStep nesterov = momentum;
  nesterov.is_nesterov = true;
  UpdateStep decayed = sgd;
  decayed.l2 = 0.25F;
  UpdateStep shrunk = sgd;
  shrunk.decay_factor = 0.75F;
  const UpdateStep adagrad{.kind = OptimizerKind::kAdagrad, .learning_rate = 0.1F, .eps = 1e-3F};
  UpdateStep rowwise = adagrad;
  rowwise.kind = OptimizerKind::kRowwiseAdagrad;
  const UpdateStep adam{.kind = OptimizerKind::kAdam,
                        .learning_rate = 0.1F,
                        .eps = 1e-3F,
                        .beta1 = 0.9F,
                        .one_minus_beta1 = 0.1F,
                        .beta2 = 0.99F,
                        .one_minus_beta2 = 0.01F,
                        .inv_sqrt_bias2 = 3.0F};
  return {sgd, momentum, nesterov, decayed, shrunk, adagrad, rowwise, adam};
}

TEST_P(Conformance, UpdatesRowsByTheFormulasOfOptimizers) {
  const std::shared_ptr<Device> device = open();
  const CurrentDevice current(*device);
  Copies copies(*device);
  const std::unique_ptr<DeviceStream> stream = device->make_stream();
  Noise noise(4);
  for (const UpdateStep& step : steps()) {
    for (const std::int64_t dim : {1, 5, 64}) {
      const std::int64_t n = 6;
      Matrices m{noise.values(n * dim), noise.values(n * dim), noise.values(n * dim),
                 noise.values(n * dim)};
      // Sums of squares are not negative.
      for (float& x : m.second) x = std::abs(x);
      if (step.kind == OptimizerKind::kAdagrad || step.kind == OptimizerKind::kRowwiseAdagrad)
        for (float& x : m.first) x = std::abs(x);
      const Matrices wanted = updated_by_formula(step, m, dim);
      const DeviceBuffer gradients = copies.up(m.gradients);
      const DeviceBuffer weights = copies.up(m.weights);
      const DeviceBuffer first = copies.up(m.first);
      const DeviceBuffer second = copies.up(m.second);
      const DeviceBuffer scratch[2] = {copies.up(m.first), copies.up(m.first)};
      const bool has_first = step.kind != OptimizerKind::kSgd || step.has_momentum;
      const bool has_second = step.kind == OptimizerKind::kAdam;
      const UpdateRows rows{.num_rows = n,
                            .dim = dim,
                            .gradients = gradients.as<float>(),
                            .weights = weights.as<float>(),
                            .state = {has_first ? first.as<float>() : nullptr,
                                      has_second ? second.as<float>() : nullptr},
                            .scratch = {scratch[0].as<float>(), scratch[1].as<float>()}};
      stream->update(step, rows);
      stream->synchronize();
      const auto kind = static_cast<int>(step.kind);
      SCOPED_TRACE("kind " + std::to_string(kind) + ", dim " + std::to_string(dim));
      expect_close(copies.down(weights.as<float>(), n * dim), wanted.weights);
      if (has_first) expect_close(copies.down(first.as<float>(), n * dim), wanted.first);
      if (has_second) expect_close(copies.down(second.as<float>(), n * dim), wanted.second);
    }
  }
}

TEST_P(Conformance, UnknownDevicesAreRefused) {
  open();  // so that nothing else fails
  EXPECT_THROW(internal::open_device(GetParam().backend, -1), std::invalid_argument);
  EXPECT_THROW(internal::open_device(GetParam().backend, 4096), std::invalid_argument);
  EXPECT_THROW(internal::open_device("tpu", 0), std::invalid_argument);
}

}  // namespace
}  // namespace recsdk::test::device_conformance_test
