// index.h: leases of many tables, and mapping the keys of many at once.
#include <nanobind/stl/optional.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "arguments/calls.h"
#include "arguments/gil.h"
#include "arguments/handles.h"
#include "arguments/refusals.h"
#include "bindings.h"
#include "index_calls.h"
#include "recsdk/index.h"

namespace recsdk::bind {
namespace {

/// The items of a list or tuple, one for each of `count` of something.
nb::tuple items_for(nb::handle object, const char* name, const char* of_what, std::size_t count) {
  nb::tuple found = sequence(object, name);
  require_size(name, of_what, count, found.size());
  return found;
}

[[noreturn, gnu::cold]] void refuse_lease(nb::handle object) {
  throw nb::type_error(
      ("leases must hold a recsdk_core.Lease or None each, got " + shown(object)).c_str());
}

/// The lease at `i` of None or a tuple of leases and Nones.
const Lease* lease_at(nb::handle leases, std::size_t i) {
  if (leases.is_none()) return nullptr;
  const nb::object lease = leases[i];
  if (lease.is_none()) return nullptr;
  if (!nb::isinstance<PyLease>(lease)) refuse_lease(lease);
  return lease_of(lease);
}

nb::object leases_for(nb::handle leases, const char* of_what, std::size_t count) {
  if (leases.is_none()) return nb::borrow(leases);
  return items_for(leases, "leases", of_what, count);
}

nb::list lease_all(nb::handle tables_object, std::optional<std::int64_t> step) {
  const nb::tuple tables = sequence(tables_object, "tables");
  const std::vector<Index*> indexes = indexes_of(tables);
  std::vector<Lease> taken;
  taken.reserve(indexes.size());
  {
    const WithoutGil without_gil;
    for (Index* const index : indexes) taken.push_back(index->lease(step));
  }
  nb::list leases;
  for (Lease& lease : taken) leases.append(PyLease(std::move(lease)));
  return leases;
}

void release_all(nb::handle leases_object) {
  const nb::tuple leases = sequence(leases_object, "leases");
  std::vector<PyLease*> given;
  for (const nb::handle lease : leases) {
    if (lease.is_none()) continue;
    if (!nb::isinstance<PyLease>(lease)) refuse_lease(lease);
    given.push_back(nb::inst_ptr<PyLease>(lease));
  }
  const WithoutGil without_gil;
  for (PyLease* const lease : given) lease->release_without_gil();
}

nb::list map_all(nb::handle calls, nb::handle insert_object, nb::handle leases_object) {
  const nb::tuple all = sequence(calls, "calls");
  const bool insert = flag(insert_object, "insert");
  const nb::object leases = leases_for(leases_object, "call", all.size());
  std::vector<nb::tuple> kept;
  std::deque<Keys> keys;
  std::vector<IndexMapCall> made;
  nb::list results;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const nb::tuple& parts = kept.emplace_back(items(all[i], 2, 2, "(table, keys)"));
    const Keys& part = keys.emplace_back(parts[1]);
    const auto n = static_cast<std::int64_t>(part.size());
    Result rows = make_rows(part.framework(), n);
    Result outcomes = make_outcomes(part.framework(), n);
    made.push_back({&index_of(parts[0]),
                    part.span(),
                    row_span(rows, part.size()),
                    outcome_span(outcomes, part.size()),
                    {insert, lease_at(leases, i)}});
    results.append(nb::make_tuple(std::move(rows.object), std::move(outcomes.object)));
  }
  {
    const WithoutGil without_gil;
    map_indexes(made);
  }
  return results;
}

/// What comes with the keys of each table, by the names of KeyData: None for none, or a tuple.
class DataOfTables {
 public:
  DataOfTables(nb::handle object, std::size_t count) {
    if (object.is_none()) return;
    const nb::tuple& tables = kept_.emplace_back(items_for(object, "data", "table", count));
    for (const nb::handle table : tables) {
      if (table.is_none()) {
        data_.emplace_back(nb::none(), nb::none(), nb::none(), nb::none(), nb::none());
        continue;
      }
      const nb::tuple& parts =
          kept_.emplace_back(items(table, 5, 5, "data (times, scores, counts, clicks, now)"));
      data_.emplace_back(parts[0], parts[1], parts[2], parts[3], parts[4]);
    }
  }
  KeyData at(std::size_t i) const { return data_.empty() ? KeyData() : data_[i].get(); }

 private:
  std::deque<nb::tuple> kept_;  // what the arrays lie in: a generator does not keep it
  std::deque<PyKeyData> data_;
};

std::size_t total(std::span<const std::span<const Key>> pieces) {
  std::size_t size = 0;
  for (const std::span<const Key> piece : pieces) size += piece.size();
  return size;
}

/// Where the keys of many tables lie in one array: in pieces, table by table.
class KeyPieces {
 public:
  /// `begins` None: one after the other. `num_pieces` None: one of each of as many tables.
  KeyPieces(const Keys& keys, nb::handle counts_object, nb::handle begins_object,
            nb::handle num_pieces_object) {
    const Integers counts(counts_object, "counts");
    const Integers begins = Integers::if_given(begins_object, "begins");
    const Integers num_pieces = Integers::if_given(num_pieces_object, "num_pieces");
    const bool are_apart = !begins_object.is_none();
    if (are_apart)
      require_size("begins", "piece of counts", counts.span().size(), begins.span().size());
    std::int64_t end = 0;
    for (std::size_t i = 0; i < counts.span().size(); ++i)
      end = add(keys.span(), are_apart ? begins.span()[i] : end, counts.span()[i]);
    if (!are_apart && end != static_cast<std::int64_t>(keys.size()))
      refuse_sum("counts", "keys", keys.size(), counts.span());
    const std::vector<std::int64_t> one_each(num_pieces_object.is_none() ? pieces_.size() : 0, 1);
    cut(num_pieces_object.is_none() ? one_each : num_pieces.span());
  }

  std::size_t size() const { return pieces_.size(); }
  std::size_t num_tables() const { return of_tables_.size(); }
  std::size_t num_keys() const { return total(pieces_); }
  std::span<const std::span<const Key>> of_table(std::size_t i) const { return of_tables_[i]; }

 private:
  /// Returns where the piece ends.
  std::int64_t add(std::span<const Key> keys, std::int64_t begin, std::int64_t count) {
    require_within("each piece of counts", "the keys", static_cast<std::int64_t>(keys.size()),
                   begin, count);
    pieces_.push_back(
        keys.subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(count)));
    return begin + count;
  }

  void cut(std::span<const std::int64_t> num_pieces) {
    std::span<const std::span<const Key>> left = pieces_;
    for (const std::int64_t count : num_pieces) {
      if (count < 0 || count > static_cast<std::int64_t>(left.size())) break;
      of_tables_.push_back(left.first(static_cast<std::size_t>(count)));
      left = left.subspan(static_cast<std::size_t>(count));
    }
    if (of_tables_.size() != num_pieces.size() || !left.empty())
      refuse_sum("num_pieces", "pieces", pieces_.size(), num_pieces);
  }

  std::vector<std::span<const Key>> pieces_;
  std::vector<std::span<const std::span<const Key>>> of_tables_;
};

/// Where the row numbers of many tables' keys go, piece by piece: None, or (out, stores, begins,
/// first_rows, default_rows, num_shared).
class Stores {
 public:
  Stores(nb::handle object, const KeyPieces& pieces) {
    if (object.is_none()) return;
    const nb::tuple given =
        items(object, 6, 6, "store (out, stores, begins, first_rows, default_rows, num_shared)");
    out_ = sequence(given[0], "out");
    for (const nb::handle out : out_) arrays_.push_back(numbers_to_fill(out, "out"));
    const Integers stores(given[1], "stores");
    const Integers begins(given[2], "begins");
    const Integers first_rows(given[3], "first_rows");
    const Integers default_rows(given[4], "default_rows");
    const Integers num_shared(given[5], "num_shared");
    const std::size_t size = pieces.num_tables();
    require_size("stores", "table", size, stores.span().size());
    require_size("first_rows", "table", size, first_rows.span().size());
    require_size("default_rows", "table", size, default_rows.span().size());
    require_size("num_shared", "table", size, num_shared.span().size());
    require_size("begins", "piece", pieces.size(), begins.span().size());
    add_parts(pieces, begins.span());
    for (std::size_t i = 0; i < size; ++i) {
      of_tables_[i].place = {first_rows.span()[i], default_rows.span()[i], num_shared.span()[i]};
      give_array(of_tables_[i], stores.span()[i]);
    }
  }

  bool are_given() const { return !of_tables_.empty() || !arrays_.empty(); }
  const StoreNumbers* at(std::size_t table) const {
    return of_tables_.empty() ? nullptr : &of_tables_[table];
  }

 private:
  void add_parts(const KeyPieces& pieces, std::span<const std::int64_t> begins) {
    parts_.reserve(begins.size());
    for (std::size_t i = 0; i < pieces.num_tables(); ++i) {
      const std::size_t first = parts_.size();
      for (const std::span<const Key> piece : pieces.of_table(i))
        parts_.push_back({begins[parts_.size()], static_cast<std::int64_t>(piece.size())});
      of_tables_.push_back({{}, {}, std::span(parts_).subspan(first), {}});
    }
  }

  void give_array(StoreNumbers& numbers, std::int64_t store) const {
    require_number_of("stores", "arrays of out", arrays_.size(), store);
    const Array& array = arrays_[static_cast<std::size_t>(store)];
    if (array.scalar == Scalar::kInt32)
      numbers.narrow = numbers_of<std::int32_t>(array);
    else
      numbers.wide = numbers_of<std::int64_t>(array);
  }

  nb::tuple out_;  // keeps the memory of the arrays
  std::vector<Array> arrays_;
  std::vector<NumberedKeys> parts_;
  std::vector<StoreNumbers> of_tables_;
};

/// The keys of pieces that lie side by side, as one.
std::optional<std::span<const Key>> joined(std::span<const std::span<const Key>> pieces) {
  if (pieces.empty()) return std::span<const Key>();
  const Key* const begin = pieces[0].data();
  std::size_t size = 0;
  for (const std::span<const Key> piece : pieces) {
    if (piece.data() != begin + size) return std::nullopt;
    size += piece.size();
  }
  return std::span(begin, size);
}

nb::tuple map_joined(nb::handle tables_object, nb::handle keys_object, nb::handle counts_object,
                     nb::handle insert_object, nb::handle leases_object, nb::handle data_object,
                     nb::handle begins_object, nb::handle num_pieces_object,
                     nb::handle store_object) {
  const nb::tuple tables = sequence(tables_object, "tables");
  const std::vector<Index*> indexes = indexes_of(tables);
  const Keys keys(keys_object);
  const bool insert = flag(insert_object, "insert");
  const KeyPieces pieces(keys, counts_object, begins_object, num_pieces_object);
  const std::size_t size = pieces.num_tables();
  require_size(num_pieces_object.is_none() ? "counts" : "num_pieces", "table", tables.size(), size);
  const nb::object leases = leases_for(leases_object, "table", size);
  const DataOfTables data(data_object, size);
  const std::size_t num_keys = pieces.num_keys();
  const Stores stores(store_object, pieces);
  const std::size_t num_rows = stores.are_given() ? 0 : num_keys;
  const Result rows = make_rows(keys.framework(), static_cast<std::int64_t>(num_rows));
  const Result outcomes = make_outcomes(keys.framework(), static_cast<std::int64_t>(num_keys));
  std::vector<IndexMapCall> made;
  std::size_t begin = 0;
  for (std::size_t i = 0; i < size; ++i) {
    const auto of_table = pieces.of_table(i);
    const std::size_t n = total(of_table);
    IndexMapCall& call =
        made.emplace_back(IndexMapCall{indexes[i],
                                       {},
                                       {},
                                       outcome_span(outcomes, num_keys).subspan(begin, n),
                                       {insert, lease_at(leases, i), data.at(i)},
                                       {},
                                       stores.at(i)});
    if (call.store == nullptr) call.rows = row_span(rows, num_rows).subspan(begin, n);
    if (const auto side_by_side = joined(of_table)) {
      call.keys = *side_by_side;
    } else {
      call.pieces = of_table;
    }
    begin += n;
  }
  {
    const WithoutGil without_gil;
    map_indexes(made);
  }
  if (stores.are_given()) return nb::make_tuple(nb::none(), outcomes.object);
  return nb::make_tuple(rows.object, outcomes.object);
}

}  // namespace

void bind_mapping(nb::module_& module) {
  module.def("map_tables", &map_all, nb::arg("calls").none(), nb::arg("insert").none(),
             nb::arg("leases").none());
  module.def("lease_tables", &lease_all, nb::arg("tables").none(), nb::arg("step").none());
  module.def("release_leases", &release_all, nb::arg("leases").none());
  module.def("map_joined", &map_joined, nb::arg("tables").none(), nb::arg("keys").none(),
             nb::arg("counts").none(), nb::arg("insert").none(), nb::arg("leases").none(),
             nb::arg("data").none(), nb::arg("begins").none(), nb::arg("num_pieces").none(),
             nb::arg("store").none());
}

}  // namespace recsdk::bind
