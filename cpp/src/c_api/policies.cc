// The functions of c_api.h about who leaves a table, and who has left.
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "c_api/convert.h"
#include "c_api/status.h"
#include "recsdk/c_api.h"
#include "recsdk/key_metadata.h"
#include "recsdk/leavers.h"

struct recsdk_leavers {
  recsdk::Leavers leavers;
};

namespace {

using recsdk::c_api::array;
using recsdk::c_api::deref;
using recsdk::c_api::guarded;
using recsdk::c_api::index_of;
using recsdk::c_api::lease_of;
using recsdk::c_api::outcomes_of;
using recsdk::c_api::reject_null;
using recsdk::c_api::table_of;
using recsdk::c_api::write_struct;

void map_with(recsdk::Index& index, const int64_t* keys, int64_t num_keys,
              const recsdk_lease* lease, const recsdk_key_data* data, int64_t* rows,
              uint8_t* outcomes) {
  index.map(
      array(keys, num_keys, "keys"), array(rows, num_keys, "rows"),
      outcomes_of(array(outcomes, num_keys, "outcomes")),
      {.insert = true, .lease = lease_of(lease), .data = recsdk::c_api::key_data(data, num_keys)});
}

void evict(recsdk::Index& index, int64_t max_rows, int64_t* num_evicted) {
  const int64_t count = index.evict(max_rows);
  if (num_evicted != nullptr) *num_evicted = count;
}

void would_evict(recsdk::Index& index, int64_t max_rows, int64_t* num_evicted) {
  deref(num_evicted, "num_evicted");
  *num_evicted = recsdk::would_evict(index, max_rows);
}

void expire(recsdk::Index& index, int is_dry, int64_t* num_expired) {
  const int64_t count = is_dry != 0 ? recsdk::would_expire(index) : index.expire();
  if (num_expired != nullptr) *num_expired = count;
}

void evict_where(recsdk::Index& index, recsdk_choose_leaving_callback choose, void* user_data,
                 int is_dry, int64_t* num_evicted) {
  if (choose == nullptr) reject_null("choose");
  const auto call = [&](const recsdk::KeptKeys& kept, std::span<std::uint8_t> leaves) {
    const auto num_keys = static_cast<std::int64_t>(kept.keys.size());
    const auto num_words = static_cast<std::int64_t>(kept.words.size()) / num_keys;
    const int status = choose(user_data, kept.keys.data(), kept.words.data(), num_keys, num_words,
                              kept.step, leaves.data());
    if (status == 0) return;
    throw recsdk::Error(recsdk::ErrorCode::kInternal,
                        "the callback choose returned " + std::to_string(status) + ", not 0");
  };
  const std::int64_t count =
      is_dry != 0 ? recsdk::would_evict_where(index, call) : recsdk::evict_where(index, call);
  if (num_evicted != nullptr) *num_evicted = count;
}

template <typename Source>
void open_leavers(Source& of, const recsdk_leavers_options* options, recsdk_leavers** leavers) {
  deref(leavers, "leavers");
  recsdk::Leavers opened = of.leavers(recsdk::c_api::leavers_options(options));
  *leavers = new recsdk_leavers{std::move(opened)};
}

recsdk::Leavers& leavers_of(recsdk_leavers* leavers) { return deref(leavers, "leavers").leavers; }
const recsdk::Leavers& leavers_of(const recsdk_leavers* leavers) {
  return deref(leavers, "leavers").leavers;
}

}  // namespace

int recsdk_default_config_init(recsdk_default_config* config) {
  return guarded([&] {
    write_struct(config, recsdk::c_api::default_row_defaults(), "recsdk_default_config");
  });
}

int recsdk_evict_config_init(recsdk_evict_config* config) {
  return guarded(
      [&] { write_struct(config, recsdk::c_api::evict_defaults(), "recsdk_evict_config"); });
}

int recsdk_admit_config_init(recsdk_admit_config* config) {
  return guarded(
      [&] { write_struct(config, recsdk::c_api::admit_defaults(), "recsdk_admit_config"); });
}

int recsdk_leavers_options_init(recsdk_leavers_options* options) {
  return guarded(
      [&] { write_struct(options, recsdk::c_api::leavers_defaults(), "recsdk_leavers_options"); });
}

int recsdk_table_map_with(recsdk_table* table, const int64_t* keys, int64_t num_keys,
                          const recsdk_lease* lease, const recsdk_key_data* data, int64_t* rows,
                          uint8_t* outcomes) {
  return guarded(
      [&] { map_with(table_of(table).index(), keys, num_keys, lease, data, rows, outcomes); });
}

int recsdk_index_map_with(recsdk_index* index, const int64_t* keys, int64_t num_keys,
                          const recsdk_lease* lease, const recsdk_key_data* data, int64_t* rows,
                          uint8_t* outcomes) {
  return guarded([&] { map_with(index_of(index), keys, num_keys, lease, data, rows, outcomes); });
}

int recsdk_table_set_time(recsdk_table* table, int64_t time) {
  return guarded([&] { table_of(table).set_time(time); });
}

int recsdk_index_set_time(recsdk_index* index, int64_t time) {
  return guarded([&] { index_of(index).set_time(time); });
}

int recsdk_table_evict(recsdk_table* table, int64_t max_rows, int64_t* num_evicted) {
  return guarded([&] { evict(table_of(table).index(), max_rows, num_evicted); });
}

int recsdk_index_evict(recsdk_index* index, int64_t max_rows, int64_t* num_evicted) {
  return guarded([&] { evict(index_of(index), max_rows, num_evicted); });
}

int recsdk_table_evict_where(recsdk_table* table, recsdk_choose_leaving_callback choose,
                             void* user_data, int is_dry, int64_t* num_evicted) {
  return guarded(
      [&] { evict_where(table_of(table).index(), choose, user_data, is_dry, num_evicted); });
}

int recsdk_index_evict_where(recsdk_index* index, recsdk_choose_leaving_callback choose,
                             void* user_data, int is_dry, int64_t* num_evicted) {
  return guarded([&] { evict_where(index_of(index), choose, user_data, is_dry, num_evicted); });
}

int recsdk_table_would_evict(recsdk_table* table, int64_t max_rows, int64_t* num_evicted) {
  return guarded([&] { would_evict(table_of(table).index(), max_rows, num_evicted); });
}

int recsdk_index_would_evict(recsdk_index* index, int64_t max_rows, int64_t* num_evicted) {
  return guarded([&] { would_evict(index_of(index), max_rows, num_evicted); });
}

int recsdk_table_expire(recsdk_table* table, int is_dry, int64_t* num_expired) {
  return guarded([&] { expire(table_of(table).index(), is_dry, num_expired); });
}

int recsdk_index_expire(recsdk_index* index, int is_dry, int64_t* num_expired) {
  return guarded([&] { expire(index_of(index), is_dry, num_expired); });
}

int recsdk_table_leavers(recsdk_table* table, const recsdk_leavers_options* options,
                         recsdk_leavers** leavers) {
  return guarded([&] { open_leavers(table_of(table), options, leavers); });
}

int recsdk_index_leavers(recsdk_index* index, const recsdk_leavers_options* options,
                         recsdk_leavers** leavers) {
  return guarded([&] { open_leavers(index_of(index), options, leavers); });
}

int recsdk_leavers_read(recsdk_leavers* leavers, int64_t capacity, int64_t* keys, uint8_t* causes,
                        float* weights, float* state, int64_t* num_rows) {
  return guarded([&] {
    recsdk::Leavers& from = leavers_of(leavers);
    deref(num_rows, "num_rows");
    array(keys, capacity, "keys");
    *num_rows =
        from.read({capacity, keys, reinterpret_cast<recsdk::LeaveCause*>(causes), weights, state});
  });
}

int recsdk_leavers_take(recsdk_leavers* leavers, int64_t capacity, int64_t* keys, uint8_t* causes,
                        int64_t* rows, int64_t* num_rows) {
  return guarded([&] {
    recsdk::Leavers& from = leavers_of(leavers);
    deref(num_rows, "num_rows");
    array(keys, capacity, "keys");
    *num_rows = from.take({.capacity = capacity,
                           .keys = keys,
                           .causes = reinterpret_cast<recsdk::LeaveCause*>(causes),
                           .rows = rows});
  });
}

int recsdk_leavers_free_rows(recsdk_leavers* leavers, int64_t num_rows) {
  return guarded([&] {
    if (num_rows < 0) recsdk::c_api::reject_value("num_rows", num_rows, "0 or more");
    leavers_of(leavers).free_rows(num_rows);
  });
}

int recsdk_leavers_num_ended(const recsdk_leavers* leavers, uint64_t* num_ended) {
  return guarded([&] {
    deref(num_ended, "num_ended");
    *num_ended = leavers_of(leavers).num_ended();
  });
}

int recsdk_leavers_wait(const recsdk_leavers* leavers, double seconds, int* has_rows) {
  return guarded([&] {
    deref(has_rows, "has_rows");
    *has_rows = leavers_of(leavers).wait(seconds) ? 1 : 0;
  });
}

int recsdk_leavers_size(const recsdk_leavers* leavers, int64_t* num_rows, uint64_t* num_lost) {
  return guarded([&] {
    const recsdk::Leavers& of = leavers_of(leavers);
    if (num_rows != nullptr) *num_rows = of.size();
    if (num_lost != nullptr) *num_lost = of.num_lost();
  });
}

int recsdk_leavers_close(recsdk_leavers* leavers) {
  return guarded([&] { leavers_of(leavers).close(); });
}

void recsdk_leavers_destroy(recsdk_leavers* leavers) { delete leavers; }
