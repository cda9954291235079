#include "index/config.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <stdexcept>

#include "admission/admission.h"
#include "eviction/churn.h"
#include "eviction/row_meta.h"
#include "recsdk/runtime.h"
#include "util/must.h"

namespace recsdk::internal {
namespace {

// Groups mean nothing without rows to divide.
void check_groups(const IndexConfig& config, const std::string& title) {
  if (!config.max_rows && (config.eviction_groups || config.owned_groups)) {
    throw std::invalid_argument(title +
                                ": eviction_groups and owned_groups divide max_rows; set it too");
  }
  if (!config.max_rows) return;
  const std::int64_t groups =
      config.eviction_groups.value_or(default_eviction_groups(*config.max_rows));
  const bool is_power = groups > 0 && std::has_single_bit(static_cast<std::uint64_t>(groups));
  if (!is_power || groups > kNumVirtualShards ||
      groups > std::max<std::int64_t>(*config.max_rows, 1)) {
    throw std::invalid_argument(
        title + ": " +
        must("eviction_groups", "be a power of two up to max_rows and 65536", groups));
  }
  const GroupRange owned = config.owned_groups.value_or(GroupRange{0, groups});
  if (owned.begin < 0 || owned.begin > owned.end || owned.end > groups) {
    throw std::invalid_argument(
        title + ": " +
        must("owned_groups", "be a range within [0, " + std::to_string(groups) + ")",
             "[" + std::to_string(owned.begin) + ", " + std::to_string(owned.end) + ")"));
  }
}

void check_record_groups(const IndexConfig& config, const std::string& title) {
  if (!config.record_groups) return;
  if (!config.admission || !config.admission->max_records)
    throw std::invalid_argument(title +
                                ": record_groups divide max_records of admission; set it too");
  const std::int64_t groups = *config.record_groups;
  const bool is_power = groups > 0 && std::has_single_bit(static_cast<std::uint64_t>(groups));
  if (!is_power || groups > kNumVirtualShards)
    throw std::invalid_argument(
        title + ": " +
        must("record_groups", "be a power of two up to max_records and 65536", groups));
}

void check_default(const DefaultConfig& config, const std::string& title) {
  const auto fail = [&](const char* name, const std::string& what, const auto& got) {
    throw std::invalid_argument(title + ": default_row." + must(name, what, got));
  };
  if (config.kind > DefaultKind::kSharedRows) {
    fail("kind", "be one of DefaultKind", config.kind);
  }
  if (!std::isfinite(config.value)) fail("value", "be finite", config.value);
  if (config.num_rows < 1 || config.num_rows > kNumVirtualShards) {
    fail("num_rows", "be 1 to " + std::to_string(kNumVirtualShards), config.num_rows);
  }
  if (config.begin_with > BeginWith::kSharedRow) {
    fail("begin_with", "be one of BeginWith", config.begin_with);
  }
  if (config.begin_with != BeginWith::kInitialRow && config.kind != DefaultKind::kSharedRows)
    fail("begin_with", "be BeginWith::kInitialRow without shared rows", config.begin_with);
}

}  // namespace

std::optional<std::int64_t> groups_of(const IndexConfig& config) {
  if (!config.max_rows) return std::nullopt;
  return config.eviction_groups.value_or(default_eviction_groups(*config.max_rows));
}

std::optional<std::int64_t> record_groups_of(const IndexConfig& config) {
  return config.record_groups ? config.record_groups : groups_of(config);
}

IndexConfig validated(IndexConfig config, const std::string& title) {
  if (config.name.empty()) throw std::invalid_argument("index: name must not be empty, got ''");
  if (config.max_rows && *config.max_rows < 0) {
    throw std::invalid_argument(title + ": " + must("max_rows", "be 0 or more", *config.max_rows) +
                                "; leave it out for no limit");
  }
  check_groups(config, title);
  if (config.eviction) {
    check_eviction(*config.eviction, title);
    check_churn(*config.eviction, title, groups_of(config));
    if (!config.max_rows && !config.eviction->expires())
      throw std::invalid_argument(title +
                                  ": eviction makes room within max_rows; set it too, or a ttl");
  }
  check_record_groups(config, title);
  if (config.admission) check_admission(*config.admission, title, record_groups_of(config));
  check_default(config.default_row, title);
  if (config.num_threads && *config.num_threads < 1) {
    throw std::invalid_argument(title + ": " +
                                must("num_threads", "be 1 or more", *config.num_threads) +
                                "; leave it out for all threads of the pool");
  }
  if (config.on_full > OnFull::kRaise) {
    throw std::invalid_argument(title + ": " + must("on_full", "be one of OnFull", config.on_full));
  }
  num_threads();  // a wrong RECSDK_NUM_THREADS fails here rather than half-way through a call
  return config;
}

}  // namespace recsdk::internal
