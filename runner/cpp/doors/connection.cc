#include "doors/connection.h"

#include <array>
#include <boost/asio/post.hpp>
#include <boost/asio/write.hpp>
#include <new>
#include <utility>

namespace mctl {
namespace {

using boost::beast::error_code;
namespace asio = boost::asio;

constexpr std::size_t kSmall = 64 << 10;    // bodies that are read without asking what they are for
constexpr std::size_t kSlowest = 64 << 10;  // bytes/s that earn a sender or reader more time
constexpr std::chrono::seconds kLinger{2};  // after its last byte, for a client that sends on after an answer
constexpr std::chrono::seconds kLongestLinger{30};
constexpr std::chrono::seconds kGuest{5};    // for a connection without a seat
constexpr std::chrono::seconds kSettled{1};  // idle for so long, a connection gives back what it does not need

asio::ip::tcp::endpoint peer_of(const asio::ip::tcp::socket& socket) {
  error_code gone;
  return socket.remote_endpoint(gone);
}

Error too_much() { return {Code::unavailable, "the server holds as much for its clients as it may: try again later"}; }

}  // namespace

// One address of IPv4; of IPv6 the network, of which a host has all addresses.
std::uint64_t client_of(const asio::ip::address& address) {
  if (address.is_v4()) return address.to_v4().to_uint();
  const asio::ip::address_v6 v6 = address.to_v6();
  if (v6.is_v4_mapped()) return asio::ip::make_address_v4(asio::ip::v4_mapped, v6).to_uint();
  std::uint64_t network = 0;
  for (std::size_t i = 0; i < 8; ++i) network = network << 8 | v6.to_bytes()[i];
  return network;
}

Connection::Connection(asio::ip::tcp::socket socket, std::shared_ptr<Shared> shared, Place place)
    : socket_(std::move(socket)),
      peer_(peer_of(socket_)),
      client_(client_of(peer_.address())),
      shared_(std::move(shared)),
      listed_(shared_->connections.insert(shared_->connections.end(), this)),
      reader_(shared_->limits.max_body, shared_->limits.max_header),
      holding_(shared_->budget, client_) {
  if (place == Place::seat) {
    seat_ = shared_->seats.take(client_, this);
  } else {
    guest_ = shared_->guests.insert(shared_->guests.end(), this);
  }
  allow();
}

Connection::~Connection() {
  leave();
  shared_->connections.erase(listed_);
}

std::string Connection::address() const {
  const std::string address = peer_.address().to_string();
  return (peer_.address().is_v6() ? "[" + address + "]" : address) + ":" + std::to_string(peer_.port());
}

std::shared_ptr<const void> Connection::take_body() {
  auto taken = std::make_shared<Buffer>();
  *taken = reader_.take_body();
  service_holds_ += taken->size();
  return taken;
}

void Connection::start() {
  guarded([this] {
    if (!reader_.make_room(RequestReader::kFirst)) return close();
    wait();
  });
}

// Memory that cannot be had is the misfortune of the connection that needs it.
template <class F>
void Connection::guarded(F f) {
  try {
    f();
  } catch (const std::bad_alloc&) {
    out_of_memory();
  }
}

void Connection::out_of_memory() {
  const bool again = std::exchange(starved_, true);
  if (again || (state_ != State::reading && state_ != State::serving)) return close();
  guarded([this] { refuse({Code::unavailable, "the server is out of memory"}); });
}

void Connection::move_to(State state) {
  state_ = state;
  if (seat_ == nullptr) return;
  seat_->phase = in_service() ? Seats::Phase::answered : Seats::Phase::unfinished;
}

// --- reading

// Waits without a buffer in hand, so that the buffer may move meanwhile. Of what is sent ahead only so much is read.
void Connection::wait() {
  if (waiting_ || peer_closed_ || state_ == State::closed) return;
  if (state_ != State::lingering &&
      (reader_.space().empty() || (state_ != State::reading && reader_.ahead() >= kSmall))) {
    return;
  }
  waiting_ = true;
  socket_.async_wait(asio::ip::tcp::socket::wait_read,
                     [self = shared_from_this()](error_code ec) { self->guarded([&] { self->on_readable(ec); }); });
}

void Connection::on_readable(error_code ec) {
  waiting_ = false;
  if (state_ == State::closed) return;
  const auto space = reader_.space();
  std::size_t count = 0;
  if (!ec) count = socket_.read_some(asio::buffer(space.data(), space.size()), ec);
  if (ec == asio::error::would_block) return wait();
  return ec ? on_end() : on_data(count);
}

void Connection::on_data(std::size_t count) {
  if (state_ == State::lingering) {
    deadline_ = std::min(Clock::now() + kLinger, begun_ + kLongestLinger);
    return wait();
  }
  if (state_ != State::reading) {
    reader_.came(count);
    return wait();
  }
  if (reader_.empty()) {
    move_to(State::reading);
    allow();
  }
  reader_.came(count);
  deadline_ += std::chrono::microseconds(count * 1'000'000 / kSlowest);
  advance();
}

void Connection::on_end() {
  peer_closed_ = true;
  const auto exchange = context.lock();
  const bool answer = state_ == State::writing || (in_service() && (!exchange || exchange->gone()));
  if (answer) return;
  context.reset();
  close();
}

// Goes on until the request in hand is complete, or needs more of the client.
void Connection::advance() {
  using Step = RequestReader::Step;
  auto step = reader_.parse();
  if (step && *step == Step::head) {
    on_head();
    if (state_ != State::reading) return wait();
    step = reader_.parse();
  }
  if (!step) {
    refuse(step.error());
  } else if (*step == Step::whole) {
    request_complete();
  } else {
    make_room();
  }
  wait();
}

void Connection::on_head() {
  if (auto refused = refuse_head()) return answer_at_once(*std::move(refused));
  if (head().expects_continue && reader_.has_body() && reader_.ahead() == 0) invite_body();
}

std::optional<Answer> Connection::refuse_head() {
  Service& service = shared_->service;
  if (!shared_->hosts.allow(head().host, head().origin)) {
    return service.refuse(*this, {Code::forbidden, "this server is not for requests to `" + head().host + "`" +
                                                       (head().origin.empty() ? "" : " from `" + head().origin + "`") +
                                                       ": name it with --allowed-hosts"});
  }
  if (seat_ == nullptr && !service.probes(head()))
    return service.refuse(*this, {Code::unavailable, "too many connections"});
  if (!reader_.has_body()) return std::nullopt;
  if (head().content_length.value_or(0) > shared_->limits.max_body) {
    return service.refuse(*this, {Code::too_large, "the body is over the limit"});
  }
  return service.screen(*this, head().content_length.value_or(SIZE_MAX) > kSmall);
}

void Connection::invite_body() {
  error_code ignored;
  constexpr std::string_view go_on = "HTTP/1.1 100 Continue\r\n\r\n";
  socket_.write_some(asio::buffer(go_on), ignored);
}

// Makes the buffer hold more of the request in hand.
void Connection::make_room() {
  if (!reader_.space().empty()) return;
  const std::size_t wanted = reader_.wanted();
  if (!count(wanted)) return refuse(too_much());
  if (!reader_.make_room(wanted)) throw std::bad_alloc();
}

bool Connection::count(std::size_t buffer) {
  const std::size_t bytes = buffer + service_holds_ + out_head_.capacity() + out_body_.capacity() + parts_bytes_;
  const bool over = bytes > kSeatBytes;
  return holding_.set(over ? bytes - kSeatBytes : 0, !over || shared_->service.knows(head()));
}

bool Connection::hold(std::size_t bytes) {
  service_holds_ += bytes;
  if (count(reader_.capacity())) return true;
  service_holds_ -= bytes;
  return false;
}

void Connection::request_complete() {
  // Not later: the service has views into the buffer. Without memory for it the client's end is seen later.
  static_cast<void>(reader_.space().empty() && reader_.make_room(reader_.wanted()));
  move_to(State::serving);
  keep_alive_ = head().keep_alive && seat_ != nullptr;
  begun_ = Clock::now();
  shared_->service.serve(shared_from_this());
}

void Connection::refuse(const Error& error) { answer_at_once(shared_->service.refuse(*this, error)); }

void Connection::answer_at_once(Answer answer) {
  keep_alive_ = false;
  unread_ = true;
  move_to(State::serving);
  begun_ = Clock::now();
  respond(std::move(answer));
}

// --- writing

void Connection::respond(Answer answer) {
  if (state_ != State::serving) return;
  guarded([&] { send(std::move(answer)); });
}

void Connection::send(Answer answer) {
  keep_alive_ = keep_alive_ && !shared_->draining && !peer_closed_;
  context.reset();
  service_holds_ = 0;
  out_body_.swap(answer.body);
  if (!count(reader_.capacity())) {
    answer = refusal(too_much());
    out_body_.swap(answer.body);
    keep_alive_ = false;
  }
  out_head_.clear();
  append_head(out_head_, answer, out_body_.size(), shared_->date, keep_alive_, head().http_1_0);
  if (head().verb == Verb::head) out_body_.clear();
  if (!unread_) reader_.next();
  move_to(State::writing);
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
  static_cast<void>(count(reader_.capacity()));  // without the request, of which the answer is left
  asio::async_write(socket_, std::array{head, body}, [self = shared_from_this()](error_code e, std::size_t) {
    self->guarded([&] { self->on_written(e); });
  });
}

void Connection::on_written(error_code ec) {
  if (state_ != State::writing) return;
  if (ec) return close();
  written();
}

void Connection::written() {
  out_body_ = {};
  static_cast<void>(count(reader_.capacity()));
  if (!keep_alive_) return linger();
  move_to(State::reading);
  if (seat_ != nullptr) Seats::rest(seat_);
  allow();
  if (reader_.empty()) return wait();
  move_to(State::reading);
  // A request that was sent ahead waits until the other connections had their turn.
  asio::post(socket_.get_executor(), [self = shared_from_this()] {
    self->guarded([&] {
      if (self->state_ == State::reading) self->advance();
    });
  });
}

// --- writing in parts

void Connection::begin_stream(Answer answer) {
  if (state_ != State::serving) return;
  guarded([&] {
    keep_alive_ = keep_alive_ && !shared_->draining && !peer_closed_ && !head().http_1_0;
    framing_ = head().verb == Verb::head ? Framing::none : head().http_1_0 ? Framing::close : Framing::chunks;
    move_to(State::streaming);
    broken_ = false;
    head_waits_ = true;
    std::string bytes;
    append_head(bytes, answer, std::nullopt, shared_->date, keep_alive_, head().http_1_0);
    add_part(std::move(bytes));
  });
}

void Connection::send_part(std::span<const std::byte> bytes) {
  if (state_ != State::streaming) return;
  guarded([&] {
    std::string part;
    const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    if (framing_ == Framing::chunks) part = chunk_start(text.size());
    if (framing_ != Framing::none) part += text;
    if (framing_ == Framing::chunks) part += "\r\n";
    add_part(std::move(part));
  });
}

void Connection::end_stream(bool in_order) {
  if (state_ != State::streaming) return;
  guarded([&] {
    context.reset();
    service_holds_ = 0;
    broken_ = !in_order;
    move_to(State::writing);
    reader_.next();
    add_part(in_order && framing_ == Framing::chunks ? "0\r\n\r\n" : "");
  });
}

void Connection::add_part(std::string bytes) {
  parts_bytes_ += bytes.size();
  parts_.push_back(std::move(bytes));
  if (!count(reader_.capacity())) return close();
  if (parts_.size() == 1) allow();
  if (!writes_part_) write_parts();
}

void Connection::write_parts() {
  while (!parts_.empty() && state_ != State::closed) {
    std::string_view part = parts_.front();
    error_code ec;
    const std::size_t sent = part.empty() ? 0 : socket_.write_some(asio::buffer(part), ec);
    if (ec && ec != asio::error::would_block) return close();
    if (sent == part.size()) {
      part_written();
      continue;
    }
    writes_part_ = true;
    part.remove_prefix(sent);
    return asio::async_write(socket_, asio::buffer(part), [self = shared_from_this()](error_code e, std::size_t) {
      self->guarded([&] {
        self->writes_part_ = false;
        if (self->state_ == State::closed) return;
        if (e) return self->close();
        self->part_written();
        self->write_parts();
      });
    });
  }
}

// The last one ends the answer; the first was the head.
void Connection::part_written() {
  parts_bytes_ -= parts_.front().size();
  parts_.pop_front();
  allow();
  static_cast<void>(count(reader_.capacity()));
  if (state_ == State::writing && parts_.empty()) return broken_ ? close() : written();
  const bool was_head = std::exchange(head_waits_, false);
  const auto exchange = context.lock();
  if (exchange && !was_head) exchange->taken();
}

// --- the end

// Closing with bytes unread would reset the connection and could destroy the answer on its way.
void Connection::linger() {
  if (peer_closed_ || (!unread_ && reader_.empty() && socket_.available() == 0)) return close();
  error_code ignored;
  socket_.shutdown(asio::ip::tcp::socket::shutdown_send, ignored);
  move_to(State::lingering);
  deadline_ = Clock::now() + kLinger;
  reader_.abandon();
  static_cast<void>(count(reader_.capacity()));
  wait();
}

void Connection::time_out() {
  const bool begun = state_ == State::reading && !reader_.empty();
  if (!begun) return close();
  guarded([this] { refuse({Code::too_slow, "the request did not come in time"}); });
}

void Connection::settle(Clock::time_point now) {
  if (state_ != State::reading || !reader_.empty() || holding_.bytes() == 0) return;
  if (now < deadline_ - shared_->limits.idle + kSettled) return;
  reader_.shrink();
  static_cast<void>(count(reader_.capacity()));
}

void Connection::close() {
  if (state_ == State::closed) return;
  const auto exchange = in_service() ? context.lock() : nullptr;
  state_ = State::closed;
  error_code ignored;
  socket_.close(ignored);
  context.reset();
  leave();
  if (exchange) exchange->gone();
}

// Its place is free for another, though the connection itself may have to wait for what still names it.
void Connection::leave() {
  if (seat_ != nullptr) shared_->seats.leave(std::exchange(seat_, nullptr));
  if (guest_) shared_->guests.erase(*std::exchange(guest_, std::nullopt));
}

void Connection::allow(std::size_t bytes) {
  const auto idle = seat_ != nullptr ? shared_->limits.idle : std::min(shared_->limits.idle, kGuest);
  deadline_ = Clock::now() + idle + std::chrono::microseconds(bytes * 1'000'000 / kSlowest);
}

}  // namespace mctl
