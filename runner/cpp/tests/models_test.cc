// Which version of which model answers.
#include "registry/models.h"

#include <boost/asio/io_context.hpp>
#include <boost/test/unit_test.hpp>
#include <cstdlib>
#include <fstream>

#include "small_bundle.h"
#include "support.h"

namespace mctl {
namespace {

// Of a bundle that no worker runs.
struct Shelf {
  Shelf() {
    const int fd = file_of(zip_of(small_members()));
    path = "/proc/self/fd/" + std::to_string(fd);
  }
  Status add(const std::string& name, const std::string& version) {
    auto model = ServedModel::open(io, reaper, {path, name, version}, {}, {}, true);
    if (!model) return model.error();
    return models.add(*std::move(model));
  }

  std::string path;
  boost::asio::io_context io;
  Reaper reaper{io};
  Models models;
};

BOOST_FIXTURE_TEST_CASE(models_are_found_by_name_and_version, Shelf) {
  for (const char* version : {"9", "10", "2", "beta"}) BOOST_TEST(why(add("scorer", version)) == "");
  BOOST_TEST(why(add("other", "1")) == "");
  BOOST_TEST((*models.find("scorer"))->version() == "10");  // numbers count as numbers
  BOOST_TEST((*models.find("scorer", "2"))->version() == "2");
  BOOST_TEST((*models.find("other"))->name() == "other");
  std::vector<std::string> versions;
  for (const auto& model : models.versions("scorer")) versions.push_back(model->version());
  BOOST_TEST(versions == (std::vector<std::string>{"beta", "2", "9", "10"}), boost::test_tools::per_element());
}

BOOST_FIXTURE_TEST_CASE(models_that_are_not_there, Shelf) {
  BOOST_TEST(why(add("a", "1")) == "");
  BOOST_TEST(why(models.find("b")) == "model 'b' is not here: this server has 'a'");
  BOOST_TEST(why(models.find("a", "2")) == "model 'a' has no version '2': it has '1'");
  BOOST_TEST(why(add("a", "1")) == "model 'a', version '1' is given twice");
  BOOST_TEST(models.versions("b").empty());
}

BOOST_AUTO_TEST_CASE(what_is_no_file_is_no_bundle) {
  boost::asio::io_context io;
  Reaper reaper(io);
  const auto opened = ServedModel::open(io, reaper, {"/dev/null"}, {}, {}, true);
  BOOST_TEST(why(opened) == "`/dev/null`: it is no regular file");
}

}  // namespace
}  // namespace mctl
