// One client: reads requests, has them answered one after the other, and keeps the limits on size and time.
#pragma once

#include <boost/asio/ip/tcp.hpp>
#include <chrono>
#include <cstddef>
#include <deque>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "doors/budget.h"
#include "doors/hosts.h"
#include "doors/http.h"
#include "doors/reader.h"
#include "doors/seats.h"
#include "format/result.h"

namespace mctl {

class Connection;
using Clock = std::chrono::steady_clock;

struct HttpLimits {
  std::size_t max_body = 64 << 20, max_header = 64 << 10;  // bytes
  std::size_t max_held = 1 << 30;                          // bytes that all clients make the server hold
  std::size_t max_connections = 1024;
  std::chrono::seconds idle{60};  // without a request; also for sending one, and for taking an answer
};

// What a service does for the request in hand of a connection. That keeps no hold of it.
class Exchange {
 public:
  virtual ~Exchange() = default;
  virtual bool gone() = 0;  // the client went away before the answer; true if an answer comes all the same
  virtual void taken() {}   // the client has taken the oldest part of a stream
};

// Bytes that a connection has without being asked: they are set aside for each, and not counted one by one.
constexpr std::size_t kSeatBytes = 16 << 10;

// What answers requests.
class Service {
 public:
  virtual ~Service() = default;
  // Leads to one respond(), now or later.
  virtual void serve(const std::shared_ptr<Connection>& connection) = 0;
  // Asked when the head of a request with a body is there: an answer refuses it before the body is. `large`: the body
  // would cost much.
  virtual std::optional<Answer> screen(const Connection& connection, bool large) = 0;
  // Has this client shown that it may use the server?
  virtual bool knows(const Head& head) const = 0;
  // Does somebody ask whether the server is well? There is always room for that.
  virtual bool probes(const Head& head) const = 0;
  // The answer to a request that is refused before it is complete.
  virtual Answer refuse(const Connection& connection, const Error& error) = 0;
};

// What connections of a server share.
struct Shared {
  Shared(HttpLimits given, Service& answers)
      : limits(std::move(given)), service(answers), budget(limits.max_held - limits.max_connections * kSeatBytes) {}

  const HttpLimits limits;
  Service& service;
  Hosts hosts;
  Budget budget;
  Seats seats;
  std::list<Connection*> connections;  // all that exist
  std::list<Connection*> guests;       // those without a seat, the oldest first
  bool draining = false;               // answers close their connections
  std::string date;                    // for the Date line, kept by the server
};

// The same number for all addresses of one client.
std::uint64_t client_of(const boost::asio::ip::address& address);

class Connection : public std::enable_shared_from_this<Connection> {
 public:
  enum class Place { seat, guest };  // a guest is answered if it probes, and then has to go

  Connection(boost::asio::ip::tcp::socket socket, std::shared_ptr<Shared> shared, Place place);
  ~Connection();

  void start();

  std::uint64_t client() const { return client_; }  // the same for all connections from one place
  std::string address() const;                      // ADDRESS:PORT
  const Head& head() const { return reader_.head(); }
  std::string_view head_text() const { return reader_.head_text(); }  // while the request is in hand
  std::span<const std::byte> body() const { return reader_.body(); }
  // Keeps the body's bytes where they are, for as long as what is returned lives: once, and body() is empty then.
  std::shared_ptr<const void> take_body();
  Clock::time_point begun() const { return begun_; }  // when the request was complete
  // Counts what the service holds for the request in hand; false if that is too much.
  [[nodiscard]] bool hold(std::size_t bytes);
  auto executor() { return socket_.get_executor(); }
  void respond(Answer answer);
  // Or an answer in parts: the head (`answer` has no body), parts, each of which is told of when the client has taken
  // it, and the end; one that is not in good order breaks the connection off, so that the client knows.
  void begin_stream(Answer answer);
  void send_part(std::span<const std::byte> bytes);
  void end_stream(bool in_order);
  std::weak_ptr<Exchange> context;  // the service's, for the request in hand

  bool gone() const { return peer_closed_ || state_ == State::closed; }  // it sends nothing more
  bool busy() const { return in_service() || state_ == State::writing; }
  bool late(Clock::time_point now) const { return now >= deadline_ && (!in_service() || !parts_.empty()); }
  void time_out();
  void settle(Clock::time_point now);  // gives back what it has not needed for a while
  void close();

 private:
  enum class State { reading, serving, streaming, writing, lingering, closed };
  bool in_service() const { return state_ == State::serving || state_ == State::streaming; }

  template <class F>
  void guarded(F f);
  void out_of_memory();
  void move_to(State state);

  void wait();
  void on_readable(boost::beast::error_code ec);
  void on_data(std::size_t count);
  void on_end();
  void advance();
  void on_head();
  std::optional<Answer> refuse_head();
  void invite_body();
  void make_room();
  bool count(std::size_t buffer);
  void request_complete();
  void refuse(const Error& error);
  void answer_at_once(Answer answer);
  void send(Answer answer);
  void write();
  void on_written(boost::beast::error_code ec);
  void written();
  void add_part(std::string bytes);
  void write_parts();
  void part_written();
  void linger();
  void leave();
  void allow(std::size_t bytes = 0);

  boost::asio::ip::tcp::socket socket_;
  const boost::asio::ip::tcp::endpoint peer_;
  const std::uint64_t client_;
  std::shared_ptr<Shared> shared_;
  const std::list<Connection*>::iterator listed_;
  std::optional<std::list<Connection*>::iterator> guest_;
  Seats::Seat* seat_ = nullptr;

  RequestReader reader_;
  State state_ = State::reading;
  bool waiting_ = false, keep_alive_ = true, peer_closed_ = false;
  bool unread_ = false;   // the request was answered before all of it was read
  bool starved_ = false;  // there was no memory for it
  Budget::Holding holding_;
  std::size_t service_holds_ = 0;

  std::string out_head_, out_body_;
  std::deque<std::string> parts_;  // of a stream, to be written
  std::size_t parts_bytes_ = 0;
  enum class Framing { chunks, close, none } framing_ = Framing::chunks;  // of the stream's parts
  bool writes_part_ = false, head_waits_ = false, broken_ = false;
  Clock::time_point begun_, deadline_;
};

}  // namespace mctl
