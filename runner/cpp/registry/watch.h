// Looks at a folder each second, in a thread of its own: the disk may be slow, or far away.
#pragma once

#include <boost/asio/io_context.hpp>
#include <functional>
#include <memory>
#include <string>

#include "format/result.h"
#include "registry/sources.h"

namespace mctl {

class FolderWatch {
 public:
  using Changed = std::function<void(Owned)>;

  FolderWatch(boost::asio::io_context& io, std::string folder);
  ~FolderWatch();  // nobody is told any more

  Result<Owned> first_look();  // by the caller, before `start`
  // `changed` is called from the event loop with what is there, whenever that is something else.
  void start(Changed changed);
  void look_now();

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace mctl
