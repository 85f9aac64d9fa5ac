#include "doors/budget.h"

namespace mctl {

bool Budget::Holding::set(std::size_t bytes, bool known) {
  if (bytes == bytes_ && (known == known_ || bytes == 0)) return true;
  const auto found = budget_.clients_.find(client_);
  const std::size_t client = found == budget_.clients_.end() ? 0 : found->second;
  const std::size_t strange = known_ ? 0 : bytes_;
  const bool fits = budget_.held_ - bytes_ + bytes <= budget_.limit_ &&
                    client - bytes_ + bytes <= budget_.most_of_one() &&
                    (known || budget_.strangers_ - strange + bytes <= budget_.limit_ / 8);
  if (!fits && (bytes > bytes_ || (known_ && !known))) return false;
  clear();
  if (bytes == 0) return true;
  bytes_ = bytes;
  known_ = known;
  budget_.held_ += bytes;
  budget_.clients_[client_] += bytes;
  if (!known) budget_.strangers_ += bytes;
  return true;
}

void Budget::Holding::clear() {
  if (bytes_ == 0) return;
  const auto found = budget_.clients_.find(client_);
  budget_.held_ -= bytes_;
  if (!known_) budget_.strangers_ -= bytes_;
  if ((found->second -= bytes_) == 0) budget_.clients_.erase(found);
  bytes_ = 0;
  known_ = true;
}

}  // namespace mctl
