// Which connection goes when there are as many as there may be and one more comes.
//
// 1. It is one of the client (address) that has the most, if that has more than the newcomer's client has. If nothing
// of
//    that client's can go, the next client is looked at.
// 2. Of a client's connections an idle one goes, the one that has had no request for the longest. If there is none, one
//    in the middle of a request, unless the two clients would only change places.
// 3. If no client that has more gives one up, an idle one of the newcomer's own client goes.
// 4. One whose request is being answered stays.
//
// So a client with a thousand connections cannot shut out a client that wants one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <set>
#include <unordered_map>

namespace mctl {

class Connection;

class Seats {
 public:
  enum class Phase : std::uint8_t { idle, unfinished, answered };  // unfinished: a request or an answer is under way
  struct Client;
  struct Seat {
    Connection* connection = nullptr;
    Client* client = nullptr;
    Phase phase = Phase::idle;
    std::list<Seat>::iterator self;
  };
  struct Client {
    std::uint64_t address = 0;
    std::list<Seat> seats;  // whoever has had no request for the longest comes first
  };

  Seat* take(std::uint64_t client, Connection* connection);
  void leave(Seat* seat);
  static void rest(Seat* seat);  // its request is over: it is idle from now on

  std::size_t taken() const { return taken_; }
  // Whose connection goes for one more of a client; nullptr: nobody's.
  Connection* yields_to(std::uint64_t newcomer) const;

 private:
  struct Larger {
    bool operator()(const Client* a, const Client* b) const;
  };
  std::unordered_map<std::uint64_t, Client> clients_;  // those that have a connection
  std::set<Client*, Larger> by_size_;
  std::size_t taken_ = 0;
};

}  // namespace mctl
