#include "doors/server.h"

#include <malloc.h>

#include <algorithm>
#include <ctime>
#include <new>
#include <vector>

namespace mctl {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

constexpr std::chrono::milliseconds kSweep{100};
constexpr std::chrono::milliseconds kNoDescriptors{50};  // pause when there are none left, or no memory
constexpr std::size_t kWorthTrimming = 16 << 20;         // bytes
constexpr std::size_t kGuests = 64;                      // connections over the limit, for those who probe

}  // namespace

Server::Server(asio::io_context& io, HttpLimits limits, Service& service)
    : io_(io), acceptor_(io), timer_(io), pause_(io), shared_(std::make_shared<Shared>(std::move(limits), service)) {}

Status Server::listen(const std::string& host, std::uint16_t port) {
  error_code ec;
  const auto found = tcp::resolver(io_).resolve(host, std::to_string(port), tcp::resolver::passive, ec);
  if (ec || found.empty()) return Error{Code::host, "no such address: `" + host + "`"};
  const tcp::endpoint endpoint = found.begin()->endpoint();
  acceptor_.open(endpoint.protocol(), ec);
  if (!ec) acceptor_.set_option(tcp::acceptor::reuse_address(true), ec);
  if (!ec) acceptor_.bind(endpoint, ec);
  if (!ec) acceptor_.listen(asio::socket_base::max_listen_connections, ec);
  if (ec) {
    const std::string why = ec == asio::error::address_in_use ? "another program listens there" : ec.message();
    return Error{Code::host, "cannot listen on " + host + ":" + std::to_string(port) + ": " + why};
  }
  go_on();
  return Done{};
}

std::string Server::url() const {
  const tcp::endpoint endpoint = acceptor_.local_endpoint();
  const std::string address = endpoint.address().to_string();
  return "http://" + (endpoint.address().is_v6() ? "[" + address + "]" : address) + ":" +
         std::to_string(endpoint.port());
}

bool Server::quiet() const {
  return std::none_of(shared_->connections.begin(), shared_->connections.end(),
                      [](const auto* c) { return c->busy(); });
}

void Server::go_on() {
  if (!accepting_) accept();
  if (!sweeping_) sweep();
}

void Server::accept() {
  accepting_ = false;
  acceptor_.async_accept([this](error_code ec, tcp::socket socket) {
    accepting_ = false;
    if (!ec) welcome(std::move(socket));
    ec&& ec != asio::error::connection_aborted ? pause() : accept();
  });
  accepting_ = true;
}

void Server::pause() {
  pause_.expires_after(kNoDescriptors);
  pause_.async_wait([this](error_code) { accept(); });
  accepting_ = true;
}

void Server::welcome(tcp::socket socket) {
  error_code ec;
  socket.non_blocking(true, ec);
  if (!ec) socket.set_option(tcp::no_delay(true), ec);
  const tcp::endpoint peer = ec ? tcp::endpoint() : socket.remote_endpoint(ec);
  if (ec) return;
  try {
    std::make_shared<Connection>(std::move(socket), shared_, place_for(client_of(peer.address())))->start();
  } catch (const std::bad_alloc&) {  // it is gone, and its client sees that
  }
}

Connection::Place Server::place_for(std::uint64_t client) {
  Seats& seats = shared_->seats;
  const std::size_t most = shared_->limits.max_connections;
  if (seats.taken() >= most) {
    if (Connection* given_up = seats.yields_to(client)) given_up->close();
  }
  if (seats.taken() < most) return Connection::Place::seat;
  if (shared_->guests.size() >= kGuests) shared_->guests.front()->close();
  return Connection::Place::guest;
}

// Times are kept to a tenth of a second, so that no timer has to be set for each request.
void Server::sweep() {
  sweeping_ = false;
  shared_->date = http_date(std::time(nullptr));
  const auto now = Clock::now();
  std::vector<std::shared_ptr<Connection>> late;
  for (Connection* connection : shared_->connections) {
    if (connection->late(now)) late.push_back(connection->shared_from_this());
    connection->settle(now);
  }
  for (const auto& connection : late) connection->time_out();
  give_back();
  timer_.expires_after(kSweep);
  timer_.async_wait([this](error_code ec) {
    if (!ec) sweep();
  });
  sweeping_ = true;
}

// Pages of the heap that lie between others do not go back by themselves.
void Server::give_back() {
  const std::size_t held = shared_->budget.held();
  most_held_ = std::max(most_held_, held);
  if (most_held_ < kWorthTrimming || held > most_held_ / 2) return;
  malloc_trim(0);
  most_held_ = held;
}

}  // namespace mctl
