// Turns and debts of clients that share a queue.
#include "engine/shares.h"

#include <boost/test/unit_test.hpp>

namespace mctl {
namespace {

BOOST_AUTO_TEST_CASE(one_client_is_served_in_order_of_arrival) {
  Shares shares;
  std::int64_t last = -1;
  for (int i = 0; i < 10; ++i) {
    const std::int64_t turn = shares.join(7, 3);
    BOOST_TEST(turn > last);
    last = turn;
    if (i % 3 == 0) shares.started(turn);
  }
}

BOOST_AUTO_TEST_CASE(two_clients_take_turns_by_rows) {
  Shares shares;
  BOOST_TEST(shares.join(1, 4) == 0);
  BOOST_TEST(shares.join(1, 4) == 4);
  BOOST_TEST(shares.join(1, 4) == 8);
  BOOST_TEST(shares.join(2, 2) == 0);
  BOOST_TEST(shares.join(2, 6) == 2);
  BOOST_TEST(shares.join(2, 1) == 8);
}

BOOST_AUTO_TEST_CASE(who_comes_late_has_saved_nothing) {
  Shares shares;
  for (int i = 0; i < 100; ++i) shares.join(1, 1);
  for (int i = 0; i < 64; ++i) shares.leave(1, 1);
  shares.started(63);
  BOOST_TEST(shares.join(2, 1) == 63);  // before what waits of the other, not before what it was served
  BOOST_TEST(shares.join(2, 1) == 64);
  BOOST_TEST(shares.join(1, 1) == 100);
}

BOOST_AUTO_TEST_CASE(who_left_starts_anew) {
  Shares shares;
  shares.join(1, 50);
  shares.started(0);
  shares.leave(1, 50);
  BOOST_TEST(shares.join(1, 1) == 0);
}

BOOST_AUTO_TEST_CASE(equal_shares_of_the_queue) {
  Shares shares;
  BOOST_TEST(shares.entitled(1, 12, 12));
  BOOST_TEST(!shares.entitled(1, 13, 12));
  shares.join(1, 9);
  shares.join(2, 2);
  BOOST_TEST(shares.largest() == 1u);
  BOOST_TEST(shares.entitled(3, 4, 12));  // of three
  BOOST_TEST(!shares.entitled(3, 5, 12));
  BOOST_TEST(shares.entitled(2, 4, 12));  // of two
  BOOST_TEST(!shares.entitled(2, 5, 12));
  BOOST_TEST(!shares.entitled(1, 1, 12));
  shares.leave(1, 8);
  BOOST_TEST(shares.largest() == 2u);
  BOOST_TEST(shares.entitled(1, 5, 12));
}

}  // namespace
}  // namespace mctl
