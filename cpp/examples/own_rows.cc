// An index with rows of one's own: the click rate of each ad, in a plain array.
//
// The index gives each raw id a row number; what lies in the rows, and where, is up to the program.
// It also tells which ids came and left since the rows were saved last.
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <vector>

#include "recsdk/recsdk.h"

namespace {

struct Clicks {
  std::int64_t shown = 0;
  std::int64_t clicked = 0;
};

/// The rows. The index calls it under its lock, before anybody sees a new id.
class ClickRows : public recsdk::RowMaker {
 public:
  void prepare(recsdk::RowNumber end, std::span<const std::uint32_t> /*reused*/) override {
    if (static_cast<std::size_t>(end) > rows.size()) rows.resize(static_cast<std::size_t>(end));
  }
  void make(const recsdk::NewRows& added) override {
    for (const std::uint32_t row : added.rows()) rows[row] = {};  // an id may have had it before
  }

  std::vector<Clicks> rows;
};

struct Events {
  std::vector<recsdk::Key> ads;
  std::vector<bool> clicked;
};

void count(recsdk::Index& index, ClickRows& kept, const Events& events) {
  std::vector<recsdk::RowNumber> rows(events.ads.size());
  std::vector<recsdk::Outcome> outcomes(events.ads.size());
  const recsdk::Lease lease = index.lease();  // no row is given to another id until it ends
  index.map(events.ads, rows, outcomes, {.insert = true, .lease = &lease});
  std::vector<recsdk::RowNumber> changed;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (!recsdk::has_row(outcomes[i])) continue;  // where the index is full
    changed.push_back(rows[i]);
    Clicks& ad = kept.rows[static_cast<std::size_t>(rows[i])];
    ++ad.shown;
    if (events.clicked[i]) ++ad.clicked;
  }
  index.note_changed(changed);
}

/// Prints what a file of changes would hold.
void save_changes(recsdk::Index& index, const ClickRows& kept) {
  recsdk::IndexCut cut = index.cut(index.is_tracking());
  for (std::size_t i = 0; i < cut.keys().size(); ++i) {
    const Clicks& ad = kept.rows[static_cast<std::size_t>(cut.rows()[i])];
    std::printf("ad %lld: %lld of %lld\n", static_cast<long long>(cut.keys()[i]),
                static_cast<long long>(ad.clicked), static_cast<long long>(ad.shown));
  }
  for (const recsdk::Key ad : cut.left()) std::printf("ad %lld left\n", static_cast<long long>(ad));
  cut.finish(true);  // what follows are the changes after it
}

int run() {
  const auto kept = std::make_shared<ClickRows>();
  recsdk::Index index({.name = "ads"}, kept);
  count(index, *kept, {{-7, 42, -7}, {true, false, false}});
  save_changes(index, *kept);
  index.erase(std::vector<recsdk::Key>{42});
  count(index, *kept, {{9000000000000000001}, {true}});
  std::puts("since then:");
  save_changes(index, *kept);
  return index.size() == 2 ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "own_rows: %s\n", error.what());
    return 1;
  }
}
