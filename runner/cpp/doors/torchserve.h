// TorchServe's management interface, for those who come from it: https://docs.pytorch.org/serve/management_api.html
//
//   GET    /ping
//   POST   /models?url=FILE&model_name=M&initial_workers=N&synchronous=true      register
//   GET    /models?limit=N&next_page_token=T                                     list
//   GET    /models/M[/V|/all]                                                    describe
//   PUT    /models/M[/V]?min_worker=N&max_worker=N&synchronous=true              scale
//   PUT    /models/M/V/set-default
//   DELETE /models/M[/V]                                                         unregister
#pragma once

#include <boost/json.hpp>
#include <functional>
#include <span>
#include <string>

#include "doors/http.h"
#include "doors/management.h"
#include "registry/fleet.h"

namespace mctl {

class TorchServe {
 public:
  using Reply = Management::Reply;

  TorchServe(Fleet& fleet, ManagementSettings settings) : fleet_(fleet), settings_(std::move(settings)) {}

  static bool owns(std::span<const std::string> path);
  void serve(const ManagementRequest& request, Reply reply);

 private:
  void add(const ManagementRequest& request, Reply reply);
  Answer list(const Head& head) const;
  Answer describe(const std::string& model, std::string_view version) const;
  void scale(const ManagementRequest& request, Reply reply);
  Answer make_default(const std::string& model, const std::string& version);
  Answer remove(const std::string& model, std::string version);
  void change(const ManagementRequest& request, const std::string& model, const std::string& version,
              const boost::json::value& patch, const std::string& done, Reply reply);
  std::string default_version(const std::string& model) const;

  Fleet& fleet_;
  const ManagementSettings settings_;
};

}  // namespace mctl
