// Who comes next: clients share the queue by rows, however many connections each of them has. Mirrors runner/shares.py,
// whose docstring numbers the rules; tests/vectors/batching/*.json runs both.
#pragma once

#include <cstdint>
#include <unordered_map>

namespace mctl {

using Client = std::uint64_t;

class Shares {
 public:
  std::int64_t join(Client client, std::int64_t rows);  // the turn of a request that starts to wait
  void rejoin(Client client, std::int64_t rows) { clients_[client].rows += rows; }  // it has its turn already
  void leave(Client client, std::int64_t rows);
  void started(std::int64_t turn);

  bool waits(Client client) const { return clients_.contains(client); }
  // Would `rows` more leave the client within its equal share of a queue for `capacity` rows?
  bool entitled(Client client, std::int64_t rows, std::int64_t capacity) const;
  Client largest() const;  // the client with the most rows, while there is one; of equal ones the lowest number

 private:
  struct Share {
    std::int64_t rows = 0;       // that wait
    std::int64_t next_turn = 0;  // of its next request
  };
  std::unordered_map<Client, Share> clients_;  // those of which something waits
  std::int64_t turn_ = 0;                      // the latest that was started
};

}  // namespace mctl
