// The listening socket and its connections.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <memory>
#include <string>

#include "doors/connection.h"
#include "format/result.h"

namespace mctl {

class Server {
 public:
  Server(boost::asio::io_context& io, HttpLimits limits, Service& service);

  Status listen(const std::string& host, std::uint16_t port);  // Code::host with the reason
  std::string url() const;

  void drain() { shared_->draining = true; }  // answers close their connections from now on
  bool quiet() const;                         // nothing is being answered

 private:
  void accept();
  void admit(boost::asio::ip::tcp::socket socket);
  void sweep();

  boost::asio::io_context& io_;
  boost::asio::ip::tcp::acceptor acceptor_;
  boost::asio::steady_timer timer_;
  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

}  // namespace mctl
