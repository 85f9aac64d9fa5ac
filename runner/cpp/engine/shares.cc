#include "engine/shares.h"

#include <algorithm>

namespace mctl {

std::int64_t Shares::join(Client client, std::int64_t rows) {
  Share& share = clients_[client];
  const std::int64_t turn = std::max(turn_, share.next_turn);
  share.next_turn = turn + rows;
  share.rows += rows;
  return turn;
}

void Shares::leave(Client client, std::int64_t rows) {
  const auto found = clients_.find(client);
  if (found != clients_.end() && (found->second.rows -= rows) <= 0) clients_.erase(found);
}

void Shares::started(std::int64_t turn) { turn_ = std::max(turn_, turn); }

bool Shares::entitled(Client client, std::int64_t rows, std::int64_t capacity) const {
  const auto own = clients_.find(client);
  const bool waits = own != clients_.end();
  const auto count = static_cast<std::int64_t>(clients_.size()) + !waits;
  return rows + (waits ? own->second.rows : 0) <= capacity / count;
}

Client Shares::largest() const {
  const auto fewer = [](const auto& a, const auto& b) {
    return a.second.rows != b.second.rows ? a.second.rows < b.second.rows : a.first > b.first;
  };
  const auto found = std::max_element(clients_.begin(), clients_.end(), fewer);
  return found == clients_.end() ? 0 : found->first;
}

}  // namespace mctl
