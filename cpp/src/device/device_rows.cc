#include "device/device_rows.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace recsdk::internal {
namespace {

// Of rows that are copied at a time.
constexpr std::size_t kChunkBytes = std::size_t{8} << 20;

std::size_t bytes_of_floats(std::int64_t num_rows, std::int64_t width) {
  return static_cast<std::size_t>(num_rows) * static_cast<std::size_t>(width) * sizeof(float);
}

// Makes room; the old memory and its contents go.
template <typename Memory>
void grow(Memory& memory, Device& device, std::size_t bytes) {
  const std::size_t wanted = std::max(bytes, memory.bytes() + memory.bytes() / 2);
  memory = Memory();
  memory = Memory(device, wanted);
}

// Divides memory among matrices; without memory it only adds up what they need.
class Divider {
 public:
  explicit Divider(std::byte* memory) : memory_(memory) {}

  float* take(std::int64_t num_rows, std::int64_t width) {
    const std::size_t bytes = bytes_of_floats(num_rows, width);
    std::byte* const place = memory_ == nullptr ? nullptr : memory_ + offset_;
    offset_ = next_offset(offset_, bytes);
    return reinterpret_cast<float*>(place);
  }
  std::byte* rest() const { return memory_ == nullptr ? nullptr : memory_ + offset_; }
  std::size_t bytes() const { return offset_; }

 private:
  std::byte* memory_;
  std::size_t offset_ = 0;
};

}  // namespace

DeviceRows::DeviceRows(const DeviceOptions& options, RowLayout layout, float default_value)
    : device_(open_device(options.backend, options.device)),
      layout_(std::move(layout)),
      num_rows_(options.max_device_rows) {
  const CurrentDevice current(*device_);
  open(options, default_value);
}

// What has been taken must go while the device is current, also where taking more has failed.
void DeviceRows::open(const DeviceOptions& options, float default_value) {
  try {
    stream_ = device_->make_stream();
    for (const RowField& field : layout_.fields) {
      const std::size_t bytes = bytes_of_floats(num_rows_ + 1, field.count);
      DeviceBuffer memory(*device_, bytes);
      const DeviceMatrix matrix{memory.as<float>(), num_rows_ + 1, field.count};
      fields_.push_back({field.name, matrix, field.initial_value, std::move(memory)});
    }
    for (UploadSlot& slot : slots_) slot.copied = device_->make_event();
    const std::vector<float> weights(static_cast<std::size_t>(layout_.dim), default_value);
    const std::vector<float> state(static_cast<std::size_t>(layout_.state_width()), 0.0F);
    const RowNumber row = options.max_device_rows;
    write({&row, 1}, weights.data(), state.data());
    stream_->synchronize();
  } catch (...) {
    stream_.reset();
    fields_.clear();
    slots_ = {};
    inputs_ = {};
    throw;
  }
}

DeviceRows::~DeviceRows() = default;

void DeviceRows::require_whole() const {
  if (broken_) throw Error(*broken_);
}

std::int64_t DeviceRows::device_bytes() const noexcept {
  std::size_t bytes = inputs_.bytes() + scratch_.bytes();
  for (const Field& field : fields_) bytes += field.memory.bytes();
  return static_cast<std::int64_t>(bytes);
}

std::int64_t DeviceRows::pinned_bytes() const noexcept {
  std::size_t bytes = download_.bytes();
  for (const UploadSlot& slot : slots_) bytes += slot.buffer.bytes();
  return static_cast<std::int64_t>(bytes);
}

std::size_t DeviceRows::row_floats() const {
  return static_cast<std::size_t>(layout_.dim + layout_.state_width());
}

void DeviceRows::free_slot(UploadSlot& slot) {
  if (!slot.is_in_flight) return;
  slot.has_event ? slot.copied->synchronize() : stream_->synchronize();
  slot.is_in_flight = false;
}

// Copies the parts to inputs_, behind each other; it is used again by the next upload.
void DeviceRows::upload(std::span<Part> parts) {
  std::size_t bytes = 0;
  for (const Part& part : parts) bytes = next_offset(bytes, part.bytes);
  UploadSlot& slot = slots_[next_slot_];
  free_slot(slot);
  if (slot.buffer.bytes() < bytes) grow(slot.buffer, *device_, bytes);
  if (inputs_.bytes() < bytes) {
    stream_->synchronize();
    grow(inputs_, *device_, bytes);
  }
  std::size_t offset = 0;
  for (Part& part : parts) {
    if (part.bytes != 0) std::memcpy(slot.buffer.data() + offset, part.from, part.bytes);
    part.to = inputs_.data() + offset;
    offset = next_offset(offset, part.bytes);
  }
  stream_->copy_to_device(inputs_.data(), slot.buffer.data(), bytes);
  slot.is_in_flight = true;
  slot.has_event = false;
  next_slot_ = (next_slot_ + 1) % slots_.size();
  stream_->record(*slot.copied);
  slot.has_event = true;
}

std::byte* DeviceRows::scratch(std::size_t bytes) {
  if (scratch_.bytes() < bytes) {
    stream_->synchronize();
    grow(scratch_, *device_, bytes);
  }
  return scratch_.data();
}

void DeviceRows::read(std::span<const RowNumber> rows, float* weights, float* state) {
  require_whole();
  const std::size_t chunk = std::max<std::size_t>(kChunkBytes / (row_floats() * sizeof(float)), 1);
  const auto state_width = static_cast<std::size_t>(layout_.state_width());
  for (std::size_t begin = 0; begin < rows.size(); begin += chunk) {
    const std::size_t count = std::min(chunk, rows.size() - begin);
    read_chunk(
        rows.subspan(begin, count),
        weights == nullptr ? nullptr : weights + begin * static_cast<std::size_t>(layout_.dim),
        state == nullptr ? nullptr : state + begin * state_width);
  }
}

void DeviceRows::read_chunk(std::span<const RowNumber> rows, float* weights, float* state) {
  const auto n = static_cast<std::int64_t>(rows.size());
  Divider sizes(nullptr);
  for (const Field& field : fields_) sizes.take(n, field.matrix.width);
  Part part{rows.data(), rows.size_bytes()};
  upload({&part, 1});
  Divider gathered(scratch(sizes.bytes()));
  if (download_.bytes() < sizes.bytes()) {
    stream_->synchronize();  // a call that failed may have left a copy to it
    grow(download_, *device_, sizes.bytes());
  }
  const auto* const row_numbers = static_cast<const std::int64_t*>(part.to);
  for (const Field& field : fields_) {
    stream_->gather(field.matrix, row_numbers, n, gathered.take(n, field.matrix.width));
  }
  stream_->copy_to_host(download_.data(), scratch_.data(), sizes.bytes());
  stream_->synchronize();

  Divider copied(download_.data());
  std::int64_t column = 0;  // of the state
  for (std::size_t f = 0; f < fields_.size(); ++f) {
    const std::int64_t width = fields_[f].matrix.width;
    const float* const from = copied.take(n, width);
    if (f == 0) {
      if (weights != nullptr) std::copy_n(from, n * width, weights);
      continue;
    }
    for (std::int64_t i = 0; i < n && state != nullptr; ++i)
      std::copy_n(from + i * width, width, state + i * layout_.state_width() + column);
    column += width;
  }
}

void DeviceRows::gather(std::span<const RowNumber> rows, float* out) {
  require_whole();
  if (rows.empty()) return;
  Part part{rows.data(), rows.size_bytes()};
  upload({&part, 1});
  stream_->gather(fields_[0].matrix, static_cast<const std::int64_t*>(part.to),
                  static_cast<std::int64_t>(rows.size()), out);
}

// State (N, S) as an array per field; without it, that of new rows.
std::vector<std::vector<float>> DeviceRows::split(std::int64_t num_rows, const float* weights,
                                                  const float* state) const {
  std::vector<std::vector<float>> values;
  std::int64_t column = 0;
  for (std::size_t f = 0; f < fields_.size(); ++f) {
    const std::int64_t width = fields_[f].matrix.width;
    std::vector<float>& field =
        values.emplace_back(static_cast<std::size_t>(num_rows * width), fields_[f].initial_value);
    if (f == 0) {
      std::copy_n(weights, num_rows * width, field.data());
      continue;
    }
    for (std::int64_t i = 0; i < num_rows && state != nullptr; ++i)
      std::copy_n(state + i * layout_.state_width() + column, width, field.data() + i * width);
    column += width;
  }
  return values;
}

void DeviceRows::write(std::span<const RowNumber> rows, const float* weights, const float* state) {
  require_whole();
  const std::size_t chunk = std::max<std::size_t>(kChunkBytes / (row_floats() * sizeof(float)), 1);
  const auto state_width = static_cast<std::size_t>(layout_.state_width());
  for (std::size_t begin = 0; begin < rows.size(); begin += chunk) {
    const std::size_t count = std::min(chunk, rows.size() - begin);
    put(rows.subspan(begin, count), weights + begin * static_cast<std::size_t>(layout_.dim),
        state == nullptr ? nullptr : state + begin * state_width, false);
  }
}

void DeviceRows::replace(std::span<const RowNumber> rows, const float* weights,
                         const float* state) {
  require_whole();
  if (!rows.empty()) put(rows, weights, state, true);
}

void DeviceRows::put(std::span<const RowNumber> rows, const float* weights, const float* state,
                     bool keeps_old) {
  const auto n = static_cast<std::int64_t>(rows.size());
  const std::vector<std::vector<float>> values = split(n, weights, state);
  std::vector<Part> parts{{rows.data(), rows.size_bytes()}};
  for (const std::vector<float>& field : values)
    parts.push_back({field.data(), field.size() * sizeof(float)});
  Divider sizes(nullptr);
  for (const Field& field : fields_) sizes.take(n, field.matrix.width);
  std::byte* const memory = keeps_old ? scratch(sizes.bytes()) : nullptr;
  upload(parts);
  const auto* const row_numbers = static_cast<const std::int64_t*>(parts[0].to);
  Divider divider(memory);
  std::vector<const float*> uploaded;
  std::vector<const float*> old;
  for (std::size_t f = 0; f < fields_.size(); ++f) {
    uploaded.push_back(static_cast<const float*>(parts[f + 1].to));
    if (!keeps_old) continue;
    float* const place = divider.take(n, fields_[f].matrix.width);
    stream_->gather(fields_[f].matrix, row_numbers, n, place);
    old.push_back(place);
  }
  commit(row_numbers, n, uploaded, old);
}

// Writes all fields or none; weights last. `old`: what the fields had, or empty: nobody needs it.
void DeviceRows::commit(const std::int64_t* rows, std::int64_t num_rows,
                        const std::vector<const float*>& values,
                        const std::vector<const float*>& old) {
  std::size_t f = fields_.size();
  try {
    for (; f-- > 0;) stream_->scatter(fields_[f].matrix, rows, num_rows, values[f]);
  } catch (...) {
    if (old.empty()) throw;
    try {
      for (std::size_t done = f + 1; done < fields_.size(); ++done)
        stream_->scatter(fields_[done].matrix, rows, num_rows, old[done]);
    } catch (const Error& error) {
      broken_ = Error(ErrorCode::kDevice,
                      std::string("the rows on ") + device_->name() +
                          " are half updated and of no use any more: " + error.what());
    }
    throw;
  }
}

// `matrices`: two that hold a step's input and its result in turn, and one for what is added.
float* DeviceRows::add_up(const RunSum& sum, std::span<const Part> steps,
                          const DeviceMatrix& gradients, std::array<float*, 3> matrices) {
  const std::int64_t dim = layout_.dim;
  const auto num_keys = static_cast<std::int64_t>(sum.order.size());
  float* current = matrices[0];
  float* next = matrices[1];
  stream_->gather(gradients, static_cast<const std::int64_t*>(steps[0].to), num_keys, current);
  std::int64_t size = num_keys;
  for (std::size_t s = 0; s < sum.steps.size(); ++s) {
    const auto num_left = static_cast<std::int64_t>(sum.steps[s].left.size());
    const auto num_right = static_cast<std::int64_t>(sum.steps[s].right.size());
    const DeviceMatrix from{current, size, dim};
    stream_->gather(from, static_cast<const std::int64_t*>(steps[2 * s + 1].to), num_left, next);
    stream_->gather(from, static_cast<const std::int64_t*>(steps[2 * s + 2].to), num_right,
                    matrices[2]);
    stream_->add(next, matrices[2], num_right, dim);
    std::swap(current, next);
    size = num_left;
  }
  return current;
}

void DeviceRows::update(const UpdateStep& step, const RunSum& sum, std::int64_t num_gradients,
                        const float* gradients) {
  require_whole();
  if (sum.rows.empty()) return;
  const auto part_of = [](const std::vector<std::int64_t>& numbers) {
    return Part{numbers.data(), numbers.size() * sizeof(std::int64_t)};
  };
  std::vector<Part> parts{part_of(sum.rows), part_of(sum.order)};
  for (const SumStep& add : sum.steps) {
    parts.push_back(part_of(add.left));
    parts.push_back(part_of(add.right));
  }
  const auto num_keys = static_cast<std::int64_t>(sum.order.size());
  const auto num_rows = static_cast<std::int64_t>(sum.rows.size());
  const std::int64_t dim = layout_.dim;
  const auto divide = [&](std::byte* memory, std::array<float*, 3>& matrices) {
    Divider divider(memory);
    matrices = {divider.take(num_keys, dim), nullptr, nullptr};
    if (sum.steps.empty()) return divider;
    matrices[1] = divider.take(num_keys, dim);
    matrices[2] = divider.take(num_keys, dim);
    return divider;
  };
  std::array<float*, 3> matrices{};
  const std::size_t bytes = divide(nullptr, matrices).bytes();
  std::byte* const memory = scratch(bytes + update_bytes(num_rows));
  upload(parts);
  std::byte* const rest = divide(memory, matrices).rest();
  // Gradients are only read.
  const DeviceMatrix all{const_cast<float*>(gradients), num_gradients, dim};
  float* const summed = add_up(sum, std::span(parts).subspan(1), all, matrices);
  update_summed(step, static_cast<const std::int64_t*>(parts[0].to), num_rows, summed, rest);
}

void DeviceRows::update(const UpdateStep& step, std::span<const RowNumber> rows,
                        const float* gradients) {
  require_whole();
  if (rows.empty()) return;
  const auto n = static_cast<std::int64_t>(rows.size());
  Part parts[] = {{rows.data(), rows.size_bytes()}, {gradients, bytes_of_floats(n, layout_.dim)}};
  std::byte* const memory = scratch(update_bytes(n));
  upload(parts);
  auto* const uploaded = static_cast<float*>(const_cast<void*>(parts[1].to));
  update_summed(step, static_cast<const std::int64_t*>(parts[0].to), n, uploaded, memory);
}

// What update_summed divides.
std::size_t DeviceRows::update_bytes(std::int64_t num_rows) const {
  Divider sizes(nullptr);
  for (const Field& field : fields_) {
    sizes.take(num_rows, field.matrix.width);
    sizes.take(num_rows, field.matrix.width);
  }
  sizes.take(num_rows, layout_.dim);
  sizes.take(num_rows, layout_.dim);
  return sizes.bytes();
}

void DeviceRows::update_summed(const UpdateStep& step, const std::int64_t* rows,
                               std::int64_t num_rows, float* gradients, std::byte* memory) {
  Divider divider(memory);
  std::vector<const float*> values;
  std::vector<const float*> old;
  UpdateRows work{.num_rows = num_rows, .dim = layout_.dim, .gradients = gradients};
  for (std::size_t f = 0; f < fields_.size(); ++f) {
    const DeviceMatrix& matrix = fields_[f].matrix;
    float* const value = divider.take(num_rows, matrix.width);
    stream_->gather(matrix, rows, num_rows, value);
    values.push_back(value);
    (f == 0 ? work.weights : work.state[f - 1]) = value;
    // Weights are written last, so their old values are never needed.
    float* const kept = f == 0 ? nullptr : divider.take(num_rows, matrix.width);
    if (f != 0) stream_->gather(matrix, rows, num_rows, kept);
    old.push_back(kept);
  }
  for (float*& matrix : work.scratch) matrix = divider.take(num_rows, layout_.dim);
  stream_->update(step, work);
  commit(rows, num_rows, values, old);
}

}  // namespace recsdk::internal
