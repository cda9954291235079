#include "serving/versions.h"

#include <algorithm>
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
  const std::shared_ptr<const Layer> newest = before.layers[0];
  const std::vector<std::shared_ptr<const Layer>> behind(before.layers.begin() + 2,
                                                         before.layers.end());
  const Sources all_behind{files, behind};
  const auto is_needed = [&](Key key) { return find_record(&all_behind, key) != nullptr; };
  const LayerShape shape = newest->shape();
  LayerCursor newer(newest->pieces(), shape.hash_seed);
  LayerCursor older(before.layers[1]->pieces(), shape.hash_seed);
  const int older_bits = before.layers[1]->range_bits();
  const int bits = range_bits_for(newest->num_bytes() + before.layers[1]->num_bytes());
  const int common_bits = std::min(older_bits, bits);
  Pieces made(std::size_t{1} << bits);
  for (std::size_t range = 0; range < made.size(); ++range) {
    made[range] = merged(newer, older, range, bits, shape, is_needed);
    if ((range + 1) % (made.size() >> common_bits) != 0) continue;
    // All of a piece, or of some, of the older layer is in `made`.
    const std::size_t done = (range + 1) >> (bits - common_bits);
    const int pieces_bits = older_bits - common_bits;
    older.release((done - 1) << pieces_bits, done << pieces_bits);
    const bool is_last = range + 1 == made.size();
    publish_merged(is_last ? nullptr : newest, std::make_shared<const Layer>(made, shape),
                   std::make_shared<const Layer>(older.pieces(), shape), behind);
  }
}

void Versions::publish_merged(const std::shared_ptr<const Layer>& newest,
                              const std::shared_ptr<const Layer>& made,
                              const std::shared_ptr<const Layer>& left,
                              std::span<const std::shared_ptr<const Layer>> behind) {
  auto next = std::make_unique<Version>(*current_.load());
  next->layers.clear();
  for (const auto& layer : {newest, made, left}) {
    if (layer != nullptr && !layer->is_empty()) next->layers.push_back(layer);
  }
  next->layers.insert(next->layers.end(), behind.begin(), behind.end());
  publish(std::move(next));
}

}  // namespace recsdk::internal
