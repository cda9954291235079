// The functions of c_api.h for an index whose rows the caller keeps.
#include "recsdk/index.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "c_api/convert.h"
#include "c_api/status.h"
#include "recsdk/c_api.h"
#include "recsdk/initializer.h"

struct recsdk_index_cut {
  recsdk::IndexCut cut;
};

namespace {

using recsdk::c_api::array;
using recsdk::c_api::deref;
using recsdk::c_api::guarded;
using recsdk::c_api::index_of;
using recsdk::c_api::lease_of;
using recsdk::c_api::optional_array;
using recsdk::c_api::outcomes_of;
using recsdk::c_api::read_struct;
using recsdk::c_api::write_struct;

/// Rows that a callback makes.
class CallbackMaker : public recsdk::RowMaker {
 public:
  CallbackMaker(recsdk_make_rows_callback call, void* user_data)
      : call_(call), user_data_(user_data) {}

  void make(const recsdk::NewRows& added) override {
    std::vector<recsdk::Key> keys(added.rows().size());
    added.copy_keys(0, keys);
    const int status = call_(user_data_, keys.data(), added.rows().data(), added.size());
    if (status == 0) return;
    throw recsdk::Error(recsdk::ErrorCode::kInternal, "the index's make_rows callback returned " +
                                                          std::to_string(status) + ", not 0");
  }

 private:
  recsdk_make_rows_callback call_;
  void* user_data_;
};

}  // namespace

int recsdk_index_config_init(recsdk_index_config* config) {
  return guarded(
      [&] { write_struct(config, recsdk::c_api::index_defaults(), "recsdk_index_config"); });
}

int recsdk_index_create(const recsdk_index_config* config, recsdk_index** index) {
  return guarded([&] {
    deref(index, "index");
    const recsdk_index_config c =
        read_struct(config, recsdk::c_api::index_defaults(), "recsdk_index_config");
    std::shared_ptr<recsdk::RowMaker> maker;
    if (c.make_rows != nullptr) maker = std::make_shared<CallbackMaker>(c.make_rows, c.user_data);
    *index = new recsdk_index{recsdk::Index(recsdk::c_api::index_config(c), std::move(maker))};
  });
}

void recsdk_index_destroy(recsdk_index* index) { delete index; }

int recsdk_index_lease(recsdk_index* index, int has_step, int64_t step, recsdk_lease** lease) {
  return guarded([&] { recsdk::c_api::take_lease(index_of(index), has_step, step, lease); });
}

int recsdk_index_map(recsdk_index* index, const int64_t* keys, int64_t num_keys, int insert,
                     const recsdk_lease* lease, int64_t* rows, uint8_t* outcomes) {
  return guarded([&] {
    index_of(index).map(array(keys, num_keys, "keys"), array(rows, num_keys, "rows"),
                        outcomes_of(array(outcomes, num_keys, "outcomes")),
                        {.insert = insert != 0, .lease = lease_of(lease)});
  });
}

int recsdk_map_indexes(const recsdk_index_map_call* calls, int64_t num_calls) {
  return guarded([&] {
    recsdk::map_indexes(
        recsdk::c_api::convert_all(calls, num_calls, "calls", recsdk::c_api::index_map_call));
  });
}

int recsdk_index_erase(recsdk_index* index, const int64_t* keys, int64_t num_keys,
                       uint8_t* outcomes) {
  return guarded([&] {
    index_of(index).erase(array(keys, num_keys, "keys"),
                          outcomes_of(optional_array(outcomes, num_keys, "outcomes")));
  });
}

int recsdk_index_clear(recsdk_index* index) {
  return guarded([&] { index_of(index).clear(); });
}

int recsdk_index_assign(recsdk_index* index, const int64_t* keys, int64_t num_keys) {
  return guarded([&] { index_of(index).assign(array(keys, num_keys, "keys")); });
}

int recsdk_index_check_idle(const recsdk_index* index) {
  return guarded([&] { index_of(index).check_idle(); });
}

int recsdk_index_size(const recsdk_index* index, int64_t* size) {
  return guarded([&] { deref(size, "size") = index_of(index).size(); });
}

int recsdk_index_end_row(const recsdk_index* index, int64_t* end_row) {
  return guarded([&] { deref(end_row, "end_row") = index_of(index).end_row(); });
}

int recsdk_index_stats(const recsdk_index* index, recsdk_stats* stats) {
  return guarded([&] {
    recsdk::TableStats from;
    static_cast<recsdk::IndexStats&>(from) = index_of(index).stats();
    write_struct(stats, recsdk::c_api::stats_of(from), "recsdk_stats");
  });
}

int recsdk_index_export_keys(const recsdk_index* index, int64_t* begin, int64_t capacity,
                             int64_t* keys, int64_t* rows, int64_t* num_keys) {
  return guarded([&] {
    deref(num_keys, "num_keys");
    *num_keys = index_of(index).export_keys(deref(begin, "begin"), array(keys, capacity, "keys"),
                                            array(rows, capacity, "rows"));
  });
}

int recsdk_index_cut_begin(recsdk_index* index, int changes_only, recsdk_index_cut** cut) {
  return guarded([&] {
    deref(cut, "cut");
    *cut = new recsdk_index_cut{index_of(index).cut(changes_only != 0)};
  });
}

int recsdk_index_cut_read(const recsdk_index_cut* cut, recsdk_index_changes* changes) {
  return guarded([&] {
    const recsdk::IndexCut& from = deref(cut, "cut").cut;
    const recsdk_index_changes to = {
        .struct_size = sizeof(to),
        .keys = from.keys().data(),
        .rows = from.rows().data(),
        .left = from.left().data(),
        .num_keys = static_cast<int64_t>(from.keys().size()),
        .num_left = static_cast<int64_t>(from.left().size()),
        .causes = reinterpret_cast<const uint8_t*>(from.causes().data())};
    write_struct(changes, to, "recsdk_index_changes");
  });
}

void recsdk_index_cut_finish(recsdk_index_cut* cut, int durable) {
  if (cut != nullptr) cut->cut.finish(durable != 0);
  delete cut;
}

int recsdk_index_is_tracking(const recsdk_index* index, int* is_tracking) {
  return guarded(
      [&] { deref(is_tracking, "is_tracking") = index_of(index).is_tracking() ? 1 : 0; });
}

int recsdk_index_note_changed(recsdk_index* index, const int64_t* rows, int64_t num_rows) {
  return guarded([&] { index_of(index).note_changed(array(rows, num_rows, "rows")); });
}

int recsdk_index_reserve(recsdk_index* index, int64_t num_rows) {
  return guarded([&] { index_of(index).reserve(num_rows); });
}

int recsdk_index_check_invariants(const recsdk_index* index) {
  return guarded([&] { index_of(index).check_invariants(); });
}

int recsdk_initial_weights(const recsdk_initializer_config* initializer, uint64_t seed,
                           const char* table_name, int64_t dim, const int64_t* keys,
                           int64_t num_keys, float* values) {
  return guarded([&] {
    const uint64_t hash = recsdk::table_hash(&deref(table_name, "table_name"));
    const recsdk::InitializerConfig config = recsdk::c_api::initializer_config(initializer, dim);
    array(values, num_keys, "values");
    recsdk::initial_weights(config, seed, hash, dim, array(keys, num_keys, "keys"), values);
  });
}
