// Expected digests: FIPS 180-4's examples (NIST, "Secure Hash Standard" test values) and Python's hashlib.
#include "format/sha256.h"

#include <boost/test/unit_test.hpp>

#include "support.h"

namespace mctl {
namespace {

const auto kPaths = {Sha256::Path::best, Sha256::Path::portable};

std::string digest(Sha256::Path path, std::string_view text, std::size_t step) {
  Sha256 hash(path);
  for (; !text.empty(); text.remove_prefix(std::min(step, text.size()))) hash.update(bytes_of(text.substr(0, step)));
  return hash.finish();
}

BOOST_AUTO_TEST_SUITE(sha256_)

BOOST_AUTO_TEST_CASE(known_digests) {
  for (const auto path : kPaths) {
    BOOST_TEST(digest(path, "", 1) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    BOOST_TEST(digest(path, "abc", 64) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    BOOST_TEST(digest(path, "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 64) ==
               "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    BOOST_TEST(digest(path, std::string(1000000, 'a'), 1000000) ==
               "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  }
}

BOOST_AUTO_TEST_CASE(every_split_gives_the_same_digest) {
  std::string text;
  for (int i = 0; i < 300; ++i) text += static_cast<char>(i * 7);
  for (const auto path : kPaths)
    for (const std::size_t step : {1, 3, 55, 56, 63, 64, 65, 128, 300})
      BOOST_TEST(digest(path, text, step) == "9a76b8af8f16f19d60de2b3999c22f9d10be4395c90ea3bfc5eb6cd6254243af");
}

BOOST_AUTO_TEST_CASE(lengths_round_the_padding) {
  const std::pair<std::size_t, std::string_view> known[] = {
      {55, "d5e285683cd4efc02d021a5c62014694958901005d6f71e89e0989fac77e4072"},
      {56, "04c26261370ee7541549d16dee320c723e3fd14671e66a099afe0a377c16888e"},
      {63, "75220b47218278e656f2013bb8f0c455a25eaf01e86c64924e9d48d89776d6f2"},
      {64, "7ce100971f64e7001e8fe5a51973ecdfe1ced42befe7ee8d5fd6219506b5393c"},
      {119, "000b48d4edf0fa7bee3c6236ecd2785baa5db4eeb8bb54341b029e0d9fa5fb0c"},
      {120, "13f05a0b594787f5ecd315edc96141bd3243203d1b7d4f0836f37308b276ba98"}};
  for (const auto path : kPaths)
    for (const auto& [length, expected] : known) BOOST_TEST(digest(path, std::string(length, 'x'), 64) == expected);
}

BOOST_AUTO_TEST_SUITE_END()

}  // namespace
}  // namespace mctl
