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
  void put(const std::string& name, const std::string& version) {
    auto model = ServedModel::open(io, reaper, {path, name, version}, {}, {}, true);
    BOOST_TEST_REQUIRE(why(model) == "");
    models.put(*std::move(model));
  }
  std::string chosen(const std::string& key = "") { return (*models.choose("scorer", "", key))->version(); }

  std::string path;
  boost::asio::io_context io;
  Reaper reaper{io};
  Models models;
};

BOOST_FIXTURE_TEST_CASE(models_are_found_by_name_and_version, Shelf) {
  for (const char* version : {"9", "10", "2", "beta"}) put("scorer", version);
  put("other", "1");
  BOOST_TEST((*models.find("scorer"))->version() == "10");  // numbers count as numbers
  BOOST_TEST((*models.find("scorer", "2"))->version() == "2");
  BOOST_TEST((*models.find("other"))->name() == "other");
  std::vector<std::string> versions;
  for (const auto& model : models.versions("scorer")) versions.push_back(model->version());
  BOOST_TEST(versions == (std::vector<std::string>{"beta", "2", "9", "10"}), boost::test_tools::per_element());
  BOOST_TEST(models.all().size() == 5U);
}

BOOST_FIXTURE_TEST_CASE(models_that_are_not_there, Shelf) {
  BOOST_TEST(why(models.find("a")) == "model 'a' is not here: this server has none");
  put("a", "1");
  BOOST_TEST(why(models.find("b")) == "model 'b' is not here: this server has 'a'");
  BOOST_TEST(why(models.find("a", "2")) == "model 'a' has no version '2': it has '1'");
  BOOST_TEST(why(models.choose("b", "", "")) == "model 'b' is not here: this server has 'a'");
  BOOST_TEST(models.versions("b").empty());
}

BOOST_FIXTURE_TEST_CASE(requests_are_counted_out_by_shares, Shelf) {
  put("scorer", "1");
  put("scorer", "2");
  BOOST_TEST(chosen() == "2");  // without shares the highest has them all
  models.direct("scorer", {{"1", 75}, {"2", 25}}, {{"canary", "2"}});
  int first = 0;
  for (int i = 0; i < 100; ++i) first += chosen() == "1";
  BOOST_TEST(first == 75);
  BOOST_TEST((*models.find("scorer"))->version() == "1");  // to look at: the one with most
  BOOST_TEST((*models.choose("scorer", "canary", ""))->version() == "2");
  const std::string of_key = chosen("user 7");
  for (int i = 0; i < 20; ++i) BOOST_TEST(chosen("user 7") == of_key);
}

BOOST_FIXTURE_TEST_CASE(a_version_without_a_share_gets_none, Shelf) {
  put("scorer", "1");
  put("scorer", "2");
  models.direct("scorer", {{"1", 100}}, {});
  models.direct("scorer", {}, {});  // 1 cannot answer now: it is what says so, though 2 could
  BOOST_TEST(chosen() == "1");
  models.remove(*models.versions("scorer").front());
  BOOST_TEST(why(models.choose("scorer", "", "")) == "model 'scorer': no version that has traffic is in memory");
}

BOOST_FIXTURE_TEST_CASE(a_version_takes_the_place_of_another, Shelf) {
  put("a", "1");
  const auto old = models.versions("a").front();
  put("a", "1");
  BOOST_TEST(models.versions("a").size() == 1U);
  models.remove(*old);  // it is not there any more: the new one stays
  BOOST_TEST(models.versions("a").size() == 1U);
  models.remove(*models.versions("a").front());
  BOOST_TEST(models.all().empty());
  BOOST_TEST(why(models.find("a")) == "model 'a' is not here: this server has none");
}

BOOST_AUTO_TEST_CASE(what_is_no_file_is_no_bundle) {
  boost::asio::io_context io;
  Reaper reaper(io);
  const auto opened = ServedModel::open(io, reaper, {"/dev/null"}, {}, {}, true);
  BOOST_TEST(why(opened) == "`/dev/null`: it is no regular file");
}

}  // namespace
}  // namespace mctl
