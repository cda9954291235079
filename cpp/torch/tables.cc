#include "tables.h"

#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <shared_mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "frozen_place.h"
#include "recsdk/serving/torch.h"

namespace recsdk::serving_torch {
namespace {

constexpr int kMostReads = 10;

Table open(const std::vector<std::string>& files) {
  std::vector<const char*> names;
  for (const std::string& file : files) names.push_back(file.c_str());
  recsdk_serving_table* table = nullptr;
  check(recsdk_serving_open(names.data(), static_cast<std::int64_t>(names.size()), &table));
  return {table, recsdk_serving_close};
}

/// What was at a path once, and its tables, those that could be opened.
struct Freeze {
  Place place;
  Frozen frozen;
  std::map<std::string, Table> tables;
};

bool is_replaced(const Freeze& freeze) {
  try {
    return read_frozen(freeze.place).token != freeze.frozen.token;
  } catch (const std::runtime_error&) {
    return false;
  }
}

const std::vector<std::string>& files_of(const Freeze& freeze, const std::string& name) {
  const auto files = freeze.frozen.files.find(name);
  if (files != freeze.frozen.files.end()) return files->second;
  throw std::runtime_error(freeze.place.path + ": has no table '" + name + "'");
}

/// Opens all other tables of a freeze that can be opened, so that another freeze does not take them
/// away. Throws if that has begun.
void open_others(Freeze& freeze) {
  for (const auto& [name, files] : freeze.frozen.files) {
    if (freeze.tables.contains(name)) continue;
    try {
      freeze.tables.emplace(name, open(files));
    } catch (const std::runtime_error&) {
      if (is_replaced(freeze)) throw;
    }
  }
}

/// Opens the table of a place, and those that were frozen with it; anew if another freeze came
/// meanwhile.
Freeze open_freeze(const Place& place) {
  for (int tries = 1;; ++tries) {
    Freeze freeze{place, read_frozen(place), {}};
    try {
      freeze.tables.emplace(place.name, open(files_of(freeze, place.name)));
      open_others(freeze);
      return freeze;
    } catch (const std::runtime_error&) {
      if (tries == kMostReads || !is_replaced(freeze)) throw;
    }
  }
}

/// Opens a table that could not be opened with the others, if it can be now.
Table open_later(const Freeze& freeze, const std::string& name) {
  const std::vector<std::string>& files = files_of(freeze, name);
  try {
    return open(files);
  } catch (const std::runtime_error&) {
    if (!is_replaced(freeze)) throw;
  }
  throw std::runtime_error(freeze.place.path +
                           ": another freeze has replaced the one whose tables are open already, "
                           "so table '" +
                           name + "' of it cannot be opened; open all of them again");
}

/// Tables of one freeze: that of the path when the first of them was asked for.
class Group {
 public:
  explicit Group(std::string path) : path_(std::move(path)) {}

  const std::string& path() const { return path_; }
  /// The table of a place of this group, opened once: who asks meanwhile waits.
  Table table_of(const Place& place) {
    const std::lock_guard lock(mutex_);
    if (!freeze_) freeze_ = open_freeze(place);
    const auto table = freeze_->tables.find(place.name);
    if (table != freeze_->tables.end()) return table->second;
    return freeze_->tables.emplace(place.name, open_later(*freeze_, place.name)).first->second;
  }

 private:
  const std::string path_;
  std::mutex mutex_;
  std::optional<Freeze> freeze_;  // none until the first table could be opened
};

/// What a place reads.
struct Reading {
  std::string path;
  std::string name;
  Table table;
};

/// What is known of the tables of this process. It lives as long as the process: operators may run
/// on threads that nobody waits for.
struct Known {
  std::shared_mutex mutex;  // held for no longer than it takes to look something up
  std::map<std::pair<std::string, std::string>, Table> given;  // which are not closed here
  std::map<std::string, std::shared_ptr<Group>> groups;
  std::map<std::string, Reading> by_place;
  std::uint64_t num_changes = 0;  // of `given` and `groups`, by the program
};

Known& known() {
  static Known* const it = new Known;
  return *it;
}

/// Finds or opens what a place reads.
Table find(const std::string& text) {
  Known& all = known();
  {
    const std::shared_lock lock(all.mutex);
    const auto found = all.by_place.find(text);
    if (found != all.by_place.end()) return found->second.table;
  }
  const Place place = parse_place(text);
  std::shared_ptr<Group> group;
  std::uint64_t num_changes = 0;
  {
    const std::unique_lock lock(all.mutex);
    const auto given = all.given.find({place.path, place.name});
    if (given != all.given.end()) {
      all.by_place.insert_or_assign(text, Reading{place.path, place.name, given->second});
      return given->second;
    }
    auto kept = all.groups.find(place.group);
    if (kept == all.groups.end())
      kept = all.groups.emplace(place.group, std::make_shared<Group>(place.path)).first;
    group = kept->second;
    num_changes = all.num_changes;
  }
  Table table = group->table_of(place);
  const std::unique_lock lock(all.mutex);
  // If the program changed something meanwhile, this call ends as it began, and the next finds out.
  if (all.num_changes == num_changes)
    all.by_place.insert_or_assign(text, Reading{place.path, place.name, table});
  return table;
}

/// Takes entries out of a map, so that what they hold goes when no lock is held any more.
template <class Map, class Is>
Map taken_out(Map& from, const Is& is) {
  Map taken;
  for (auto each = from.begin(); each != from.end();) {
    const auto next = std::next(each);
    if (is(each->second)) taken.insert(from.extract(each));
    each = next;
  }
  return taken;
}

void close_all_of(const std::string& path) {
  Known& all = known();
  std::map<std::string, Reading> readings;
  std::map<std::string, std::shared_ptr<Group>> groups;
  const std::unique_lock lock(all.mutex);
  ++all.num_changes;
  readings = taken_out(all.by_place, [&](const Reading& each) { return each.path == path; });
  groups = taken_out(all.groups, [&](const auto& each) { return each->path() == path; });
}

void use_at(const std::string& path, const std::string& name, const recsdk_serving_table* table) {
  Known& all = known();
  const std::pair at(path, name);
  const Table given(table, [](const recsdk_serving_table*) {});
  const std::unique_lock lock(all.mutex);
  if (table == nullptr) {
    all.given.erase(at);
  } else {
    all.given.insert_or_assign(at, given);
  }
  ++all.num_changes;
  std::erase_if(all.by_place, [&](const auto& each) {
    return each.second.path == path && each.second.name == name;
  });
}

recsdk_serving_info info_of(const recsdk_serving_table* table) {
  recsdk_serving_info info{};
  info.struct_size = sizeof(info);
  check(recsdk_serving_get_info(table, &info));
  return info;
}

}  // namespace

void check(int status) {
  if (status != RECSDK_SERVING_OK) throw std::runtime_error(recsdk_serving_last_error_message());
}

Table table_of(const std::string& place, std::int64_t dim) {
  Table table = find(place);
  const recsdk_serving_info info = info_of(table.get());
  if (info.dim != dim) {
    throw std::runtime_error("table '" + std::string(info.name) + "' has width " +
                             std::to_string(info.dim) + ", and the program was exported for " +
                             std::to_string(dim) + "; export it again");
  }
  return table;
}

}  // namespace recsdk::serving_torch

extern "C" int recsdk_serving_torch_use(const char* path, const char* name,
                                        const recsdk_serving_table* table) {
  if (path == nullptr || name == nullptr) return RECSDK_SERVING_ERROR_INVALID_ARGUMENT;
  try {
    recsdk::serving_torch::use_at(path, name, table);
  } catch (const std::bad_alloc&) {
    return RECSDK_SERVING_ERROR_OUT_OF_MEMORY;
  }
  return RECSDK_SERVING_OK;
}

extern "C" int recsdk_serving_torch_close(const char* path) {
  if (path == nullptr) return RECSDK_SERVING_ERROR_INVALID_ARGUMENT;
  try {
    recsdk::serving_torch::close_all_of(path);
  } catch (const std::bad_alloc&) {
    return RECSDK_SERVING_ERROR_OUT_OF_MEMORY;
  }
  return RECSDK_SERVING_OK;
}
