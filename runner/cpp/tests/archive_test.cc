// Zips that are sound, and zips that lie. Records and their fields: PKWARE's APPNOTE, section 4.3.
#include "format/archive.h"

#include <unistd.h>

#include <boost/test/unit_test.hpp>
#include <cstring>
#include <random>

#include "format/weights.h"
#include "small_bundle.h"
#include "support.h"

namespace mctl {

using namespace std::string_literals;
namespace {

// What reading says: empty, or the error of the archive or of its manifest.
std::string fault(const std::string& bytes) {
  const int fd = file_of(bytes);
  const auto archive = Archive::open(fd);
  std::string text = archive ? why(read_manifest(*archive)) : why(archive);
  close(fd);
  return text;
}

using Edits = std::map<std::string, std::pair<std::size_t, std::string>>;

std::string edited(const std::string& record, std::size_t at, const std::string& bytes) {
  return fault(zip_of(small_members(), Edits{{record, {at, bytes}}}));
}

const std::string kSo = "small/data/aotinductor/dynamic/a.so";
const std::string kWeightsName = "small/mctl/weights.safetensors";

BOOST_AUTO_TEST_SUITE(archive_)

BOOST_AUTO_TEST_CASE(a_sound_bundle_is_read) {
  const Members members = small_members();
  const int fd = file_of(zip_of(members));
  const auto archive = Archive::open(fd);
  BOOST_REQUIRE_MESSAGE(archive, why(archive));
  BOOST_TEST(archive->members().size() == members.size());
  for (const auto& [name, data] : members) {
    const std::string path = name.substr(name.find('/') + 1);
    BOOST_TEST(*archive->read(path, 1 << 20) == data);
    const auto mapping = archive->map(path);
    BOOST_REQUIRE(mapping);
    BOOST_TEST((std::string_view(reinterpret_cast<const char*>(mapping->bytes().data()), data.size()) == data));
    BOOST_TEST(archive->members().find(path)->second.offset % 64 == 0u);
  }
  const auto manifest = read_manifest(*archive);
  BOOST_REQUIRE_MESSAGE(manifest, why(manifest));
  BOOST_TEST(why(verify(*manifest, "mctl/weights.safetensors", bytes_of(members[1].second))).empty());
  BOOST_TEST(why(verify(*manifest, "mctl/weights.safetensors", bytes_of(members[0].second))) ==
             "member `mctl/weights.safetensors` does not have the SHA-256 that the manifest says");
  BOOST_TEST(why(archive->read("extra/mctl/manifest.json", 10)) ==
             "member `extra/mctl/manifest.json` has more bytes than are allowed");
  BOOST_TEST(why(archive->read("nothing", 10)) == "it has no member `nothing`");
  close(fd);
}

BOOST_AUTO_TEST_CASE(writes_to_a_mapping_stay_private) {
  const int fd = file_of(zip_of(small_members()));
  const auto archive = Archive::open(fd);
  const auto mapping = archive->map("mctl/weights.safetensors", true);
  mapping->bytes()[0] = std::byte{0xff};
  BOOST_TEST(*archive->read("mctl/weights.safetensors", 1 << 20) == small_members()[1].second);
  close(fd);
}

BOOST_AUTO_TEST_CASE(what_is_no_archive) {
  for (const auto* text : {"", "PK", "hello, this is a text file that is somewhat longer than the end record of a zip"})
    BOOST_TEST(fault(text) == "it does not end with a zip directory: it was cut, or something was added to it");
  const std::string sound = zip_of(small_members());
  for (const std::size_t size : {sound.size() - 1, sound.size() / 2, std::size_t{100}})
    BOOST_TEST(fault(sound.substr(0, size)).starts_with("it does not end with a zip directory"));
  BOOST_TEST(fault(sound + '\0').starts_with("it does not end with a zip directory"));
  BOOST_TEST(fault(sound.substr(64)) == "its zip directory is not where it says");
  BOOST_TEST(fault("#!/bin/sh\n" + sound) == "its zip directory is not where it says");
  BOOST_TEST(fault(zip_of({})).starts_with("it does not end with a zip directory"));
}

BOOST_AUTO_TEST_CASE(records_that_lie) {
  BOOST_TEST(edited("end", 20, "\1") == "its zip directory has a comment or spans several files");
  BOOST_TEST(edited("end", 4, "\1") == "its zip directory has a comment or spans several files");
  BOOST_TEST(edited("end", 8, "\3") == "its zip directory has a comment or spans several files");
  BOOST_TEST(edited("end", 8, "\5\0\5"s) == "its zip directory is shorter than it says");
  BOOST_TEST(edited("end", 8, "\3\0\3"s) == "its zip directory is empty or longer than its entries");
  BOOST_TEST(edited("end", 12, "\xff") == "its zip directory is not where it says");
  const std::string so = "member `" + kSo + "` ";
  BOOST_TEST(edited("central " + kSo, 10, "\x08") == so + "is compressed, which is not allowed");
  BOOST_TEST(edited("central " + kSo, 8, "\1") == so + "is encrypted, which is not allowed");
  BOOST_TEST(edited("central " + kSo, 8, "\x08") == so + "has zip flags that are not allowed");
  BOOST_TEST(edited("central " + kSo, 20, "\1") == so + "has two sizes");
  BOOST_TEST(edited("central " + kSo, 16, "\1") == so + "has a local header that disagrees with the directory");
  BOOST_TEST(edited("local " + kSo, 22, "\1") == so + "has a local header that disagrees with the directory");
  BOOST_TEST(edited("local " + kSo, 8, "\x08") == so + "has a local header that disagrees with the directory");
  BOOST_TEST(edited("local " + kSo, 30, "S") == so + "has a local header that disagrees with the directory");
  BOOST_TEST(edited("local " + kSo, 0, "XX") == so + "has a local header that disagrees with the directory");
  BOOST_TEST(edited("central " + kWeightsName, 42, "\xff\xff\xff") ==
             "member `" + kWeightsName + "` has no local header");
  BOOST_TEST(edited("central " + kSo, 20, "\xf0\xff\xff\xff\xf0\xff\xff\xff") ==
             so + "reaches beyond the end of the data");
  BOOST_TEST(edited("central " + kSo, 24, "\xff\xff\xff\xff") ==
             so + "has a zip64 record that does not fit, or an extra field that is not allowed");
}

// The zip64 records of a sound archive, with `change` made to one byte.
std::string with_zip64(std::size_t at, char change) {
  const std::string sound = zip_of(small_members()), end = sound.substr(sound.size() - 22);
  const std::string before = sound.substr(0, sound.size() - 22);
  const auto field = [&](std::size_t place, std::size_t size) {
    return end.substr(place, size) + std::string(8 - size, '\0');
  };
  const auto here = static_cast<char>(before.size() & 0xff), above = static_cast<char>(before.size() >> 8);
  std::string records = "PK\6\6" + "\x2c\0\0\0\0\0\0\0"s + "\x2d\0\x2d\0\0\0\0\0\0\0\0\0"s + field(8, 2) +
                        field(10, 2) + field(12, 4) + field(16, 4) + "PK\6\7\0\0\0\0"s + here + above +
                        "\0\0\0\0\0\0\1\0\0\0"s;
  records[at] ^= change;
  return before + records + end;
}

BOOST_AUTO_TEST_CASE(zip64_end_records) {
  BOOST_TEST(fault(with_zip64(0, 0)).empty());
  BOOST_TEST(fault(with_zip64(0, 1)) == "its zip64 end record is not where its locator says");
  BOOST_TEST(fault(with_zip64(56 + 8, 1)) == "its zip64 end record is not where its locator says");
  BOOST_TEST(fault(with_zip64(56 + 4, 1)) == "its zip64 end record is not where its locator says");
  BOOST_TEST(fault(with_zip64(4, 1)) == "its zip64 end record is not plain");
  BOOST_TEST(fault(with_zip64(24, 1)) == "its zip64 end record is not plain");
  BOOST_TEST(fault(with_zip64(40, 1)) == "its two end records disagree");
}

BOOST_AUTO_TEST_CASE(names_that_are_not_allowed) {
  const auto named = [](const std::string& name) { return fault(zip_of({{name, "x"}})); };
  const std::pair<const char*, const char*> faults[] = {
      {"a/../b", "has an empty part, `.` or `..`"}, {"/a/b", "is absolute"},
      {"a//b", "has an empty part, `.` or `..`"},   {"a/./b", "has an empty part, `.` or `..`"},
      {"../b", "has an empty part, `.` or `..`"},   {"a/..", "has an empty part, `.` or `..`"},
      {"a/", "has an empty part, `.` or `..`"},     {"a/b\\c", "holds a backslash"}};
  for (const auto& [name, fault] : faults)
    BOOST_TEST(named(name) == "member `" + std::string(name) + "` has a name that is not allowed: it " + fault);
  for (const auto* name : {"a/\xff", "a/\xc0\xaf", "a/\xed\xa0\x80", "a/\xf5\x80\x80\x80", "a/\xe2\x82"})
    BOOST_TEST(named(name).ends_with("has a name that is not valid UTF-8"));
  BOOST_TEST(named("a/\n") == "member `a/\\x0a` has a name that is not allowed: it holds a control character");
  BOOST_TEST(named("a/\x7f").ends_with("it holds a control character"));
  BOOST_TEST(named("alone") == "member `alone` is in no folder");
  BOOST_TEST(named("a/" + std::string(600, 'b')).ends_with("an entry that is cut, too long or has a comment"));
  BOOST_TEST(named("a/\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80") == "it is an archive, but no bundle of mctl");
}

BOOST_AUTO_TEST_CASE(other_letters_need_their_flag) {
  const Members members{{"a/\xc3\xa9", "x"}};
  const Edits no_flag{{"local a/\xc3\xa9", {6, "\0\0"s}}, {"central a/\xc3\xa9", {8, "\0\0"s}}};
  BOOST_TEST(fault(zip_of(members, no_flag)).ends_with("has a name that is not valid UTF-8"));
}

BOOST_AUTO_TEST_CASE(members_off_their_boundary) {
  std::string file = zip_of(small_members());
  const auto change = [&](std::size_t at, int bytes, int by) {
    std::uint32_t value = 0;
    std::memcpy(&value, &file[at], bytes);
    value += by;
    std::memcpy(&file[at], &value, bytes);
  };
  // One byte of the first member's padding becomes data of the one before: here, its header's extra field shrinks.
  const std::size_t extra = 30 + kSo.size();
  file.erase(extra + 4, 1);
  change(28, 2, -1);         // size of the extra field
  change(extra + 2, 2, -1);  // size of its one record
  const std::size_t end = file.size() - 22;
  std::uint32_t directory = 0;
  std::memcpy(&directory, &file[end + 16], 4);
  change(end + 16, 4, -1);
  for (std::size_t at = directory - 1; at < end;) {
    std::uint32_t header = 0;
    std::uint16_t name = 0;
    std::memcpy(&header, &file[at + 42], 4);
    std::memcpy(&name, &file[at + 28], 2);
    if (header != 0) change(at + 42, 4, -1);
    at += 46 + name;
  }
  BOOST_TEST(fault(file).ends_with("is not on a boundary of 64 bytes"));
}

BOOST_AUTO_TEST_CASE(members_that_do_not_fit_together) {
  Members twice = small_members();
  twice.push_back(twice[0]);
  BOOST_TEST(fault(zip_of(twice)) == "member `" + kSo + "` is there twice");
  Members elsewhere = small_members();
  elsewhere.emplace_back("other/a", "x");
  BOOST_TEST(fault(zip_of(elsewhere)) == "member `other/a` is in another top folder than the first");
  const auto at_the_first = edited("central " + kWeightsName, 42, std::string(4, '\0'));
  BOOST_TEST(at_the_first == "member `" + kWeightsName + "` has a local header that disagrees with the directory");
  const std::string sound = zip_of(small_members());
  BOOST_TEST(fault(sound).empty());
}

BOOST_AUTO_TEST_CASE(members_and_manifest_disagree) {
  Members added = small_members();
  added.emplace_back("small/extra/more.txt", "x");
  BOOST_TEST(fault(zip_of(added)) == "member `extra/more.txt` is not in the manifest's list");
  Members cut = small_members();
  cut[1].second.pop_back();
  BOOST_TEST(fault(zip_of(cut)) == "member `mctl/weights.safetensors` has another size than the manifest says");
  Members with_manifest = small_members();
  boost::json::value manifest = boost::json::parse(with_manifest.back().second);
  manifest.at("members").as_object()["extra/mctl/manifest.json"] = {{"size", 1}, {"sha256", std::string(64, '0')}};
  with_manifest.back().second = boost::json::serialize(manifest);
  BOOST_TEST(fault(zip_of(with_manifest)) ==
             "member `extra/mctl/manifest.json` has another size than the manifest says");
  Members missing = small_members();
  missing.erase(missing.begin() + 2);
  BOOST_TEST(fault(zip_of(missing)) == "it has no member `mctl/golden/first.safetensors`");
}

// Reads everything that a front and a worker read before they map code.
void read_all(const std::string& bytes) {
  const int fd = file_of(bytes);
  if (const auto archive = Archive::open(fd)) {
    const auto manifest = read_manifest(*archive);
    auto weights = Weights::map(*archive);
    if (manifest && weights) {
      for (const auto& [name, constant] : manifest->variants[0].constants)
        if (const auto tensor = weights->tensor(name, constant)) weights->reset();
      for (const Golden& golden : manifest->golden)
        if (const auto mapping = archive->map(golden.member, true); mapping && read_tensors(mapping->bytes())) continue;
    }
  }
  close(fd);
}

std::string mutated(std::string bytes, std::mt19937& random) {
  const auto below = [&](std::size_t limit) {
    return std::uniform_int_distribution<std::size_t>(0, limit - 1)(random);
  };
  for (std::size_t changes = 1 + below(4); changes > 0; --changes) {
    const std::size_t at = below(bytes.size()), size = 1 + below(std::min<std::size_t>(bytes.size() - at, 16));
    switch (below(5)) {
      case 0:
        bytes[at] = static_cast<char>(below(256));
        break;
      case 1:
        bytes[at] ^= static_cast<char>(1 << below(8));
        break;
      case 2:
        bytes.erase(at, size);
        break;
      case 3:
        bytes.insert(below(bytes.size()), bytes.substr(at, size));
        break;
      default:
        bytes.replace(at, size, std::string(size, below(2) == 0 ? '\0' : '\xff'));
        break;
    }
    if (bytes.empty()) bytes = "x";
  }
  return bytes;
}

BOOST_AUTO_TEST_CASE(mutated_bundles_give_an_answer) {
  std::mt19937 random(1);
  const std::string sound = zip_of(small_members());
  for (int i = 0; i < 3000; ++i) read_all(mutated(sound, random));
  for (int i = 0; i < 3000; ++i) {  // in a zip that is sound: the members themselves
    Members members = small_members();
    auto& data = members[static_cast<std::size_t>(i) % members.size()].second;
    data = mutated(data, random);
    if (i % 4 != 3) members.back().second = small_manifest({members.begin(), members.end() - 1});
    read_all(zip_of(members));
  }
  BOOST_TEST(fault(sound).empty());
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace mctl
