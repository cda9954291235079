#include "serving/versions.h"

#include <exception>

namespace recsdk::internal {
namespace {

/// A key that is in no layer costs a line of each of them.
constexpr std::size_t kMostLayers = 2;
/// A layer is merged with the one behind it when it has this share of its size: then each row is
/// copied a few times, whatever the number of deltas.
constexpr std::int64_t kMergedShare = 4;

std::shared_ptr<const SharedRecords> shared_of(const SharedImage& image) {
  auto made = std::make_shared<SharedRecords>(SharedRecords{{}, image});
  for (std::int64_t row = 0; row < image.num_rows(); ++row)
    made->records.push_back(made->owned.record(row));
  return made;
}

}  // namespace

std::int64_t Version::layer_bytes() const {
  std::int64_t bytes = shared->owned.num_bytes();
  for (const auto& layer : layers) bytes += layer->num_bytes();
  return bytes;
}

Versions::~Versions() {
  const Version* const last = current_.load();
  if (last != &first_) delete last;
}

void Versions::publish(std::unique_ptr<const Version> next) {
  const Version* const old = current_.exchange(next.release());
  if (old == &first_) return;
  Readers::of_process().wait();
  delete old;
}

void Versions::take(const ServingDelta::Impl& delta, const FrozenShards& files) {
  const Version& before = *current_.load();
  const Prepared made = prepare(delta, before.sources(files));
  auto next = std::make_unique<Version>(before);
  if (made.layer != nullptr) next->layers.insert(next->layers.begin(), made.layer);
  if (!delta.shared.is_empty()) next->shared = shared_of(delta.shared);
  next->num_rows += made.num_more_rows;
  ++next->num_deltas;
  Readers::of_process();  // what it may throw, it throws here
  publish(std::move(next));
  try {
    while (has_many_layers()) merge_newest(files);
  } catch (const std::exception&) {  // what has no memory to be merged is as right unmerged
  }
}

bool Versions::has_many_layers() const {
  const auto& layers = current_.load()->layers;
  if (layers.size() < 2) return false;
  return layers.size() > kMostLayers ||
         layers[0]->num_bytes() * kMergedShare > layers[1]->num_bytes();
}

void Versions::merge_newest(const FrozenShards& files) {
  const Version& before = *current_.load();
  auto next = std::make_unique<Version>(before);
  next->layers.erase(next->layers.begin(), next->layers.begin() + 2);
  const Sources behind = next->sources(files);
  auto both =
      std::make_shared<const Layer>(merged(*before.layers[0], *before.layers[1], [&](Key key) {
        return find_record(&behind, key) != nullptr;
      }));
  const bool is_empty = both->rows.is_empty() && both->erased.is_empty();
  if (!is_empty) next->layers.insert(next->layers.begin(), std::move(both));
  publish(std::move(next));
}

}  // namespace recsdk::internal
