// Saving and restoring through the C interface.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "c_api_handles.h"
#include "recsdk/c_api.h"

namespace recsdk::test::c_api_checkpoint_test {
namespace {

struct DestroyCut {
  void operator()(recsdk_cut* cut) const { recsdk_cut_destroy(cut); }
};
using CutHandle = std::unique_ptr<recsdk_cut, DestroyCut>;
struct DestroyRestore {
  void operator()(recsdk_restore* restore) const { recsdk_restore_destroy(restore); }
};
using RestoreHandle = std::unique_ptr<recsdk_restore, DestroyRestore>;

void expect_ok(int status) { EXPECT_EQ(status, RECSDK_OK) << recsdk_last_error_message(); }

recsdk_write_options write_options() {
  recsdk_write_options options{};
  options.struct_size = sizeof(options);
  expect_ok(recsdk_write_options_init(&options));
  return options;
}

CutHandle take_cut(recsdk_table* table, bool changes_only = false) {
  recsdk_cut_options options{};
  options.struct_size = sizeof(options);
  options.changes_only = changes_only ? 1 : 0;
  recsdk_cut* cut = nullptr;
  expect_ok(recsdk_table_cut(table, &options, &cut));
  return CutHandle(cut);
}

RestoreHandle begin_restore(const recsdk_table* table) {
  recsdk_restore* restore = nullptr;
  expect_ok(recsdk_restore_create(table, &restore));
  return RestoreHandle(restore);
}

class CApiCheckpointTest : public testing::Test {
 protected:
  CApiCheckpointTest() : path_(testing::TempDir() + "recsdk_c_api_XXXXXX") {
    descriptor_ = mkstemp(path_.data());
    std::vector<float> values(300);
    expect_ok(recsdk_table_find_or_insert(table_.get(), keys_.data(), 100, nullptr, values.data(),
                                          nullptr));
  }
  ~CApiCheckpointTest() override {
    close(descriptor_);
    unlink(path_.c_str());
  }

  recsdk_row_file_summary summary_{.struct_size = sizeof(recsdk_row_file_summary),
                                   .num_rows = 0,
                                   .num_erased = 0,
                                   .num_bytes = 0,
                                   .checksum = {}};
  std::string path_;
  int descriptor_ = -1;
  std::vector<std::int64_t> keys_ = [] {
    std::vector<std::int64_t> keys(100);
    for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<std::int64_t>(i) * 3 - 150;
    return keys;
  }();
  TableHandle table_ = make_table(default_config(3));
};

TEST_F(CApiCheckpointTest, WhatIsSavedIsRestored) {
  const CutHandle cut = take_cut(table_.get());
  recsdk_write_options options = write_options();
  options.descriptor = descriptor_;
  expect_ok(recsdk_write_rows(cut.get(), &options, &summary_));
  EXPECT_EQ(summary_.num_rows, 100);
  EXPECT_EQ(std::string(summary_.checksum).size(), 32U);
  expect_ok(recsdk_cut_finish(cut.get(), 1));

  const TableHandle copy = make_table(default_config(3));
  const RestoreHandle restore = begin_restore(copy.get());
  recsdk_row_file_summary read = summary_;
  read.checksum[0] = 'x';
  expect_ok(recsdk_restore_add_file(restore.get(), descriptor_, summary_.num_bytes, "the file",
                                    nullptr, &read));
  EXPECT_STREQ(read.checksum, summary_.checksum);
  EXPECT_EQ(size_of(copy.get()), 0);
  expect_ok(recsdk_restore_commit(restore.get(), 12, 0.0));
  EXPECT_EQ(size_of(copy.get()), 100);
  std::uint64_t count = 0;
  expect_ok(recsdk_table_update_count(copy.get(), &count));
  EXPECT_EQ(count, 12U);

  // A rank of two, by modulo.
  const RestoreHandle half = begin_restore(copy.get());
  recsdk_restore_options some{};
  some.struct_size = sizeof(some);
  some.has_modulo = 1;
  some.modulo_world = 2;
  expect_ok(recsdk_restore_add_file(half.get(), descriptor_, summary_.num_bytes, "the file", &some,
                                    nullptr));
  expect_ok(recsdk_restore_commit(half.get(), 0, 0.0));
  EXPECT_EQ(size_of(copy.get()), 50);
}

TEST_F(CApiCheckpointTest, MetadataOfAnotherRuleAreDropped) {
  const auto table_by = [](std::int32_t order) {
    recsdk_evict_config eviction{};
    eviction.struct_size = sizeof(eviction);
    expect_ok(recsdk_evict_config_init(&eviction));
    eviction.order = order;
    recsdk_table_config config = default_config(3);
    config.max_rows = 200;
    config.has_max_rows = 1;
    config.eviction = &eviction;
    return make_table(config);
  };
  const TableHandle by_step = table_by(RECSDK_EVICT_LRU);
  std::vector<float> values(300);
  expect_ok(recsdk_table_find_or_insert(by_step.get(), keys_.data(), 100, nullptr, values.data(),
                                        nullptr));
  recsdk_write_options options = write_options();
  options.descriptor = descriptor_;
  expect_ok(recsdk_write_rows(take_cut(by_step.get()).get(), &options, &summary_));

  const TableHandle by_count = table_by(RECSDK_EVICT_LFU);
  recsdk_restore_options some{};
  some.struct_size = sizeof(some);
  expect_failure(recsdk_restore_add_file(begin_restore(by_count.get()).get(), descriptor_,
                                         summary_.num_bytes, "the file", &some, nullptr),
                 RECSDK_ERROR_CHECKPOINT, "metadata");
  some.drop_metadata = 1;
  const RestoreHandle restore = begin_restore(by_count.get());
  expect_ok(recsdk_restore_add_file(restore.get(), descriptor_, summary_.num_bytes, "the file",
                                    &some, nullptr));
  expect_ok(recsdk_restore_commit(restore.get(), 0, 0.0));
  EXPECT_EQ(size_of(by_count.get()), 100);
  some.reserved = 1;
  expect_invalid(recsdk_restore_add_file(begin_restore(by_count.get()).get(), descriptor_,
                                         summary_.num_bytes, "the file", &some, nullptr),
                 "recsdk_restore_options.reserved");
}

TEST_F(CApiCheckpointTest, ACutTellsWhatItHolds) {
  {
    const CutHandle cut = take_cut(table_.get());
    recsdk_write_options options = write_options();
    options.descriptor = descriptor_;
    expect_ok(recsdk_write_rows(cut.get(), &options, nullptr));
    expect_ok(recsdk_cut_finish(cut.get(), 1));
  }
  expect_ok(recsdk_table_erase(table_.get(), keys_.data(), 4, nullptr));
  const CutHandle delta = take_cut(table_.get(), true);
  recsdk_cut_info info{};
  info.struct_size = sizeof(info);
  expect_ok(recsdk_cut_get_info(delta.get(), &info));
  EXPECT_EQ(info.num_rows, 0);
  EXPECT_EQ(info.num_erased, 4);
  EXPECT_EQ(info.changes_only, 1);
  EXPECT_EQ(info.is_finished, 0);
  EXPECT_GT(stats_of(table_.get()).tracking_bytes, 0);
  recsdk_cut* second = nullptr;
  expect_failure(recsdk_table_cut(table_.get(), nullptr, &second), RECSDK_ERROR_BUSY,
                 "a cut is open");
  EXPECT_EQ(second, nullptr);
}

TEST_F(CApiCheckpointTest, ACallbackTakesTheBytesOrFailsTheCall) {
  std::string written;
  recsdk_write_options options = write_options();
  options.user_data = &written;
  options.callback = [](void* user_data, const void* bytes, size_t size) {
    static_cast<std::string*>(user_data)->append(static_cast<const char*>(bytes), size);
    return 0;
  };
  expect_ok(recsdk_write_rows(take_cut(table_.get()).get(), &options, &summary_));
  EXPECT_EQ(static_cast<std::int64_t>(written.size()), summary_.num_bytes);
  options.callback = [](void*, const void*, size_t) { return 5; };
  options.name = "nowhere";
  expect_failure(recsdk_write_rows(take_cut(table_.get()).get(), &options, nullptr),
                 RECSDK_ERROR_CHECKPOINT, "'nowhere': the callback returned 5");
}

TEST_F(CApiCheckpointTest, MistakesAndDamageAreTold) {
  recsdk_cut* cut = nullptr;
  expect_invalid(recsdk_table_cut(nullptr, nullptr, &cut), "table");
  expect_invalid(recsdk_table_cut(table_.get(), nullptr, nullptr), "cut");
  recsdk_cut_options changes{};
  changes.struct_size = sizeof(changes);
  changes.changes_only = 1;
  expect_invalid(recsdk_table_cut(table_.get(), &changes, &cut), "save in full first");
  changes.struct_size = 1;
  expect_invalid(recsdk_table_cut(table_.get(), &changes, &cut), "struct_size");
  recsdk_write_options options = write_options();
  options.codec = 9;
  expect_invalid(recsdk_write_rows(take_cut(table_.get()).get(), &options, nullptr), "codec");
  options = write_options();
  options.name = nullptr;
  expect_invalid(recsdk_write_rows(take_cut(table_.get()).get(), &options, nullptr), "name");
  options = write_options();
  expect_failure(recsdk_write_rows(take_cut(table_.get()).get(), &options, nullptr),
                 RECSDK_ERROR_CHECKPOINT, "cannot write");
  const RestoreHandle restore = begin_restore(table_.get());
  expect_failure(recsdk_restore_add_file(restore.get(), descriptor_, 0, "empty", nullptr, nullptr),
                 RECSDK_ERROR_CHECKPOINT, "'empty', byte 0");
  expect_invalid(recsdk_restore_add_file(restore.get(), descriptor_, -1, "less", nullptr, nullptr),
                 "negative");
  recsdk_cut_destroy(nullptr);
  recsdk_restore_destroy(nullptr);
}

}  // namespace
}  // namespace recsdk::test::c_api_checkpoint_test
