// The versions of a table: its files, and the layers in front of them.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "serving/delta_rows.h"
#include "serving/find.h"
#include "serving/readers.h"

namespace recsdk::internal {

struct Version {
  std::vector<std::shared_ptr<const Layer>> layers;  // the newest first
  std::shared_ptr<const SharedRecords> shared;       // not null
  std::int64_t num_rows = 0;
  std::int64_t num_deltas = 0;  // taken since the files

  Sources sources(const FrozenShards& files) const { return {files, layers}; }
  std::int64_t layer_bytes() const;
};

/// What one thread has at a time. A forked process lacks the thread that had it: there it is free.
class Turn {
 public:
  /// False if another thread has it.
  bool begin() {
    const pid_t here = getpid();
    pid_t holder = kNobody;
    if (holder_.compare_exchange_strong(holder, here)) return true;
    return holder != here && holder_.compare_exchange_strong(holder, here);
  }
  void end() { holder_.store(kNobody); }

 private:
  static constexpr pid_t kNobody = 0;  // no process has this number

  std::atomic<pid_t> holder_{kNobody};  // the process of the thread that has it
};

class Versions {
 public:
  Versions() = default;
  ~Versions();
  Versions(const Versions&) = delete;
  Versions& operator=(const Versions&) = delete;

  /// What the files have, before the first read.
  void start(std::int64_t num_rows, SharedRecords shared) {
    first_.num_rows = num_rows;
    first_.shared = std::make_shared<const SharedRecords>(std::move(shared));
  }

  /// Calls use(version) with the newest one, which stays until the call ends. Nothing is waited
  /// for.
  template <class Use>
  decltype(auto) read(const Use& use) const {
    // The first version stays as long as the table, so a table that takes no deltas counts no
    // readers.
    if (current_.load(std::memory_order_acquire) == &first_) return use(first_);
    const Readers::Call call(Readers::of_process());
    return use(*current_.load());
  }

  /// Puts a delta in front, merges layers until they are few, and frees what was replaced. One
  /// thread at a time. If it throws, nothing has changed.
  void take(const ServingDelta::Impl& delta, const FrozenShards& files);

 private:
  void publish(std::unique_ptr<const Version> next);
  bool has_many_layers() const;
  /// Merges the two newest layers, piece by piece, each of which is published: so hardly more
  /// memory is held than before.
  void merge_newest(const FrozenShards& files);
  /// While layers are merged: `made` and `left` have no range of hashes in common.
  void publish_merged(const std::shared_ptr<const Layer>& newest,
                      const std::shared_ptr<const Layer>& made,
                      const std::shared_ptr<const Layer>& left,
                      std::span<const std::shared_ptr<const Layer>> behind);

  Version first_;
  std::atomic<const Version*> current_{&first_};
};

}  // namespace recsdk::internal
