// What may lie in the place of a manifest of frozen tables. What is done with its text, tests of
// exported models check, as that needs Boost.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>

#include "support/frozen_tables.h"
#include "torch/manifest_text.h"

namespace recsdk::test::manifest_text_test {
namespace {

using serving_torch::kMostManifestBytes;
using serving_torch::manifest_text;

void expect_refused(const std::string& path, const std::string& part) {
  try {
    manifest_text(path);
    ADD_FAILURE() << path << " was read";
  } catch (const std::runtime_error& error) {
    const std::string message = error.what();
    EXPECT_EQ(message.find(path + ": "), 0U) << message;
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }
}

class ManifestTextTest : public ::testing::Test {
 protected:
  std::string write(const std::string& text) const {
    std::ofstream(path_, std::ios::binary) << text;
    return path_;
  }

  TemporaryFolder folder_;
  std::string path_ = folder_.path() + "/manifest.json";
};

TEST_F(ManifestTextTest, IsWhatAPlainFileHolds) {
  for (const std::string& text : {std::string(), std::string("{\"a\": 1}\n"),
                                  std::string("\r\n\0\xff", 4), std::string(100'000, 'x')}) {
    EXPECT_EQ(manifest_text(write(text)), text);
  }
}

TEST_F(ManifestTextTest, IsReadThroughALink) {
  const std::string link = folder_.path() + "/link";
  std::filesystem::create_symlink(write("text"), link);
  EXPECT_EQ(manifest_text(link), "text");
}

TEST_F(ManifestTextTest, WhatIsMissingOrAFolderIsRefused) {
  expect_refused(path_, "cannot be read");
  expect_refused(folder_.path(), "cannot be read");
}

// Nobody writes to it, so a read would never end.
TEST_F(ManifestTextTest, APipeIsNotWaitedFor) {
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);
  expect_refused(path_, "cannot be read");
}

TEST_F(ManifestTextTest, APipeThatComesInBetweenIsNotWaitedFor) {
  const std::string pipe = folder_.path() + "/pipe";
  const std::string file = folder_.path() + "/file";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  std::filesystem::rename(write("text"), file);
  std::filesystem::create_hard_link(file, path_);
  std::atomic<bool> is_done = false;
  std::thread other([&] {
    const std::string next = folder_.path() + "/next";
    while (!is_done) {
      for (const std::string& each : {pipe, file}) {
        std::filesystem::create_hard_link(each, next);
        std::filesystem::rename(next, path_);
      }
    }
  });
  for (int i = 0; i < 20'000; ++i) {
    try {
      EXPECT_EQ(manifest_text(path_), "text");
    } catch (const std::runtime_error&) {  // it is the pipe
    }
  }
  is_done = true;
  other.join();
}

// A sparse file: on disk it takes no room.
TEST_F(ManifestTextTest, WhatIsTooLargeIsNotRead) {
  std::filesystem::resize_file(write(""), kMostManifestBytes + 1);
  expect_refused(path_, "has 268435457 bytes, more than a manifest may");
}

}  // namespace
}  // namespace recsdk::test::manifest_text_test
