#include "doors/seats.h"

#include <algorithm>
#include <utility>

namespace mctl {
namespace {

// So much is looked through for each newcomer, and no more.
constexpr std::size_t kClientsTried = 8, kSeatsTried = 64;

Connection* longest(const Seats::Client& client, Seats::Phase phase) {
  std::size_t tried = 0;
  for (const Seats::Seat& seat : client.seats) {
    if (seat.phase == phase) return seat.connection;
    if (++tried == kSeatsTried) break;
  }
  return nullptr;
}

}  // namespace

bool Seats::Larger::operator()(const Client* a, const Client* b) const {
  return std::pair(b->seats.size(), a->address) < std::pair(a->seats.size(), b->address);
}

Seats::Seat* Seats::take(std::uint64_t address, Connection* connection) {
  Client& client = clients_[address];
  client.address = address;
  by_size_.erase(&client);
  client.seats.push_back({connection, &client, Phase::idle, {}});
  client.seats.back().self = std::prev(client.seats.end());
  by_size_.insert(&client);
  ++taken_;
  return &client.seats.back();
}

void Seats::leave(Seat* seat) {
  Client& client = *seat->client;
  by_size_.erase(&client);
  client.seats.erase(seat->self);
  --taken_;
  if (client.seats.empty()) {
    clients_.erase(clients_.find(client.address));
  } else {
    by_size_.insert(&client);
  }
}

void Seats::rest(Seat* seat) {
  auto& seats = seat->client->seats;
  seat->phase = Phase::idle;
  seats.splice(seats.end(), seats, seat->self);
}

Connection* Seats::yields_to(std::uint64_t newcomer) const {
  const auto own = clients_.find(newcomer);
  const std::size_t has = own == clients_.end() ? 0 : own->second.seats.size();
  std::size_t tried = 0;
  for (const Client* client : by_size_) {
    const std::size_t size = client->seats.size();
    if (size <= has || ++tried > kClientsTried) break;
    if (Connection* found = longest(*client, Phase::idle)) return found;
    if (size == has + 1) continue;  // they would only change places
    if (Connection* found = longest(*client, Phase::unfinished)) return found;
  }
  return has > 0 ? longest(own->second, Phase::idle) : nullptr;
}

}  // namespace mctl
