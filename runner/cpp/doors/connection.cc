#include "doors/connection.h"

#include <array>
#include <boost/asio/post.hpp>
#include <boost/asio/write.hpp>
#include <cstring>

namespace mctl {
namespace {

using boost::beast::error_code;
namespace asio = boost::asio;

constexpr std::size_t kFirstBuffer = 8 << 10;
constexpr std::size_t kKeptBuffer = 256 << 10;  // a larger one is given back after its request
constexpr std::size_t kSlack = 4 << 10;         // room to see the next request, or the end, while one is served
constexpr std::size_t kSmall = 64 << 10;        // requests that are not counted in Shared::held
constexpr std::size_t kSlowest = 64 << 10;      // bytes/s that earn a sender or reader more time
constexpr std::chrono::seconds kLinger{2};      // after its last byte, for a client that sends on after an answer
constexpr std::chrono::seconds kLongestLinger{30};

asio::ip::tcp::endpoint peer_of(const asio::ip::tcp::socket& socket) {
  error_code gone;
  return socket.remote_endpoint(gone);
}

}  // namespace

Connection::Connection(asio::ip::tcp::socket socket, std::shared_ptr<Shared> shared)
    : socket_(std::move(socket)), peer_(peer_of(socket_)), shared_(std::move(shared)) {
  shared_->connections.insert(this);
  parser_.emplace(shared_->limits.max_body, static_cast<std::uint32_t>(shared_->limits.max_header));
  allow();
}

Connection::~Connection() {
  hold(0);
  shared_->connections.erase(this);
}

std::string Connection::address() const {
  const std::string address = peer_.address().to_string();
  return (peer_.address().is_v6() ? "[" + address + "]" : address) + ":" + std::to_string(peer_.port());
}

// One address of IPv4; of IPv6 the network, of which a host has all addresses.
std::uint64_t Connection::client() const {
  const asio::ip::address address = peer_.address();
  if (address.is_v4()) return address.to_v4().to_uint();
  const asio::ip::address_v6 v6 = address.to_v6();
  if (v6.is_v4_mapped()) return asio::ip::make_address_v4(asio::ip::v4_mapped, v6).to_uint();
  std::uint64_t network = 0;
  for (std::size_t i = 0; i < 8; ++i) network = network << 8 | v6.to_bytes()[i];
  return network;
}

void Connection::start() {
  grow(kFirstBuffer);
  wait();
}

void Connection::turn_away(const Error& error) {
  grow(kFirstBuffer);
  refuse(error);
}

std::span<const std::byte> Connection::body() const {
  if (parser_->chunked()) return std::as_bytes(std::span(parser_->chunks()));
  return std::as_bytes(std::span(buffer_.get() + body_at_, parsed_ - body_at_));
}

std::shared_ptr<const void> Connection::take_body() {
  if (parser_->chunked()) return std::make_shared<std::string>(parser_->take_chunks());
  const std::shared_ptr<char[]> taken = std::move(buffer_);
  const std::string_view rest(taken.get() + parsed_, filled_ - parsed_);  // what was sent ahead
  capacity_ = filled_ = parsed_ = body_at_ = 0;
  grow(std::max(kFirstBuffer, rest.size() + kSlack));
  std::memcpy(buffer_.get(), rest.data(), rest.size());
  filled_ = rest.size();
  return taken;
}

// --- reading

// Waits without a buffer in hand, so that the buffer may move meanwhile.
void Connection::wait() {
  if (waiting_ || peer_closed_ || state_ == State::closed || filled_ == capacity_) return;
  waiting_ = true;
  socket_.async_wait(asio::ip::tcp::socket::wait_read,
                     [self = shared_from_this()](error_code ec) { self->on_readable(ec); });
}

void Connection::on_readable(error_code ec) {
  waiting_ = false;
  if (state_ == State::closed) return;
  std::size_t count = 0;
  if (!ec) count = socket_.read_some(asio::buffer(buffer_.get() + filled_, capacity_ - filled_), ec);
  if (ec == asio::error::would_block) return wait();
  return ec ? on_end() : on_data(count);
}

void Connection::on_data(std::size_t count) {
  if (state_ == State::lingering) {
    deadline_ = std::min(Clock::now() + kLinger, begun_ + kLongestLinger);
    return wait();
  }
  if (state_ != State::reading) {
    filled_ += count;
    return wait();
  }
  if (filled_ == 0) allow();
  filled_ += count;
  deadline_ += std::chrono::microseconds(count * 1'000'000 / kSlowest);
  advance();
}

void Connection::on_end() {
  peer_closed_ = true;
  const bool answer = state_ == State::writing || (state_ == State::serving && shared_->service->gone(*this));
  if (!answer) close();
}

// Goes on until the request in hand is complete, or needs more of the client.
void Connection::advance() {
  while (state_ == State::reading && step()) continue;
  if (state_ == State::reading && !make_room()) return;
  wait();
}

// Parses on; false if it needs more bytes.
bool Connection::step() {
  if (parsed_ == filled_) return false;
  const auto taken = parser_->take({buffer_.get() + parsed_, filled_ - parsed_});
  if (!taken) return refuse(taken.error()), false;
  parsed_ += *taken;
  if (!head_done_ && parser_->is_header_done()) on_head();
  if (state_ != State::reading) return false;
  if (head_done_ && parser_->is_done()) return request_complete(), false;
  if (!head_done_ && filled_ > shared_->limits.max_header) {
    return refuse({Code::invalid, "the head is over the limit"}), false;
  }
  return *taken > 0;
}

void Connection::on_head() {
  head_done_ = true;
  body_at_ = parsed_;
  if (body_at_ > shared_->limits.max_header) return refuse({Code::invalid, "the head is over the limit"});
  // Allowed once, and read in different ways: what one server takes for a field is a value to another (RFC 9112, 5.2).
  const std::string_view text(buffer_.get(), parsed_);
  if (text.find("\r\n ") != text.npos || text.find("\r\n\t") != text.npos) {
    return refuse({Code::invalid, "a header line is folded"});
  }
  if (head().content_length.value_or(0) > shared_->limits.max_body) {
    return refuse({Code::too_large, "the body is over the limit"});
  }
  // A small body is read in any case, so that the connection can go on.
  if (head().content_length.value_or(SIZE_MAX) > kSmall && !parser_->is_done()) {
    if (auto welcome = shared_->service->screen(*this); !welcome) return refuse(welcome.error());
  }
  if (head().expects_continue && !parser_->is_done() && parsed_ == filled_) {
    error_code ignored;
    constexpr std::string_view go_on = "HTTP/1.1 100 Continue\r\n\r\n";
    socket_.write_some(asio::buffer(go_on), ignored);
  }
}

// Makes the buffer hold what the request in hand still needs; false if the request was refused.
bool Connection::make_room() {
  if (head_done_ && parser_->chunked()) {  // its body is kept elsewhere
    std::memmove(buffer_.get() + body_at_, buffer_.get() + parsed_, filled_ - parsed_);
    filled_ -= parsed_ - body_at_;
    parsed_ = body_at_;
  }
  std::size_t wanted = std::max(filled_ + 1, capacity_);
  if (head_done_ && head().content_length) wanted = body_at_ + *head().content_length + kSlack;
  if (wanted > capacity_) grow(std::max(wanted, head_done_ ? wanted : 2 * capacity_));
  const std::size_t request = filled_ + (parser_->chunked() && head_done_ ? parser_->chunks().size() : 0);
  hold(request > kSmall ? request : 0);
  if (shared_->held <= shared_->limits.max_held) return true;
  refuse({Code::unavailable, "too many large requests at once"});
  return false;
}

void Connection::grow(std::size_t capacity) {
  if (capacity <= capacity_) return;
  auto larger = std::make_unique_for_overwrite<char[]>(capacity);
  if (filled_) std::memcpy(larger.get(), buffer_.get(), filled_);
  buffer_ = std::move(larger);
  capacity_ = capacity;
}

void Connection::request_complete() {
  if (capacity_ - filled_ == 0) grow(capacity_ + kSlack);  // not later: the service has views into the buffer
  state_ = State::serving;
  keep_alive_ = head().keep_alive;
  begun_ = Clock::now();
  shared_->service->serve(shared_from_this());
}

void Connection::refuse(const Error& error) {
  keep_alive_ = false;
  state_ = State::serving;
  begun_ = Clock::now();
  respond(shared_->service->refuse(*this, error));
}

// --- writing

void Connection::respond(Answer answer) {
  if (state_ != State::serving) return;
  keep_alive_ = keep_alive_ && !shared_->draining && !peer_closed_;
  out_head_.clear();
  append_head(out_head_, answer, shared_->date, keep_alive_, head().http_1_0);
  out_body_ = std::move(answer.body);
  if (head().verb == Verb::head) out_body_.clear();
  context.reset();
  state_ = State::writing;
  allow(out_body_.size());
  write();
}

// Most answers fit the socket's buffer and are gone after one call.
void Connection::write() {
  const std::array<asio::const_buffer, 2> parts{asio::buffer(out_head_), asio::buffer(out_body_)};
  const std::size_t total = out_head_.size() + out_body_.size();
  error_code ec;
  const std::size_t sent = socket_.write_some(parts, ec);
  if (ec && ec != asio::error::would_block) return close();
  if (sent == total) return written();
  asio::const_buffer head = parts[0], body = parts[1];
  head += sent;
  if (sent > out_head_.size()) body += sent - out_head_.size();
  asio::async_write(socket_, std::array{head, body},
                    [self = shared_from_this()](error_code e, std::size_t n) { self->on_written(e, n); });
}

void Connection::on_written(error_code ec, std::size_t) {
  if (state_ != State::writing) return;
  if (ec) return close();
  written();
}

void Connection::written() {
  out_body_ = {};
  if (!keep_alive_) return linger();
  next_request();
  if (filled_ == 0) return wait();
  // A request that was sent ahead waits until the other connections had their turn.
  asio::post(socket_.get_executor(), [self = shared_from_this()] { self->advance(); });
}

void Connection::next_request() {
  std::memmove(buffer_.get(), buffer_.get() + parsed_, filled_ - parsed_);
  filled_ -= parsed_;
  parsed_ = body_at_ = 0;
  head_done_ = false;
  if (capacity_ > kKeptBuffer && filled_ <= kFirstBuffer) {
    capacity_ = 0;
    grow(kFirstBuffer);
  }
  hold(0);
  parser_.emplace(shared_->limits.max_body, static_cast<std::uint32_t>(shared_->limits.max_header));
  state_ = State::reading;
  allow();
}

// --- the end

// Closing with bytes unread would reset the connection and could destroy the answer on its way.
void Connection::linger() {
  if (peer_closed_ || (parser_->is_done() && parsed_ == filled_ && socket_.available() == 0)) return close();
  error_code ignored;
  socket_.shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
  state_ = State::lingering;
  deadline_ = Clock::now() + kLinger;
  filled_ = 0;
  grow(kSmall);
  wait();
}

void Connection::time_out() {
  const bool begun = state_ == State::reading && filled_ > 0;
  return begun ? refuse({Code::too_slow, "the request did not come in time"}) : close();
}

void Connection::close() {
  if (state_ == State::closed) return;
  state_ = State::closed;
  error_code ignored;
  socket_.close(ignored);
  context.reset();
}

void Connection::hold(std::size_t bytes) {
  shared_->held += bytes - held_;
  held_ = bytes;
}

void Connection::allow(std::size_t bytes) {
  deadline_ = Clock::now() + shared_->limits.idle + std::chrono::microseconds(bytes * 1'000'000 / kSlowest);
}

}  // namespace mctl
