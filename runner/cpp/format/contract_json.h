// The contract as it stands in the manifest.
#pragma once

#include <boost/json/value.hpp>
#include <string>

#include "format/contract.h"

namespace mctl {

// Reads on after a fault, of which the first is kept in `fault`; validate() is the caller's.
Contract contract_from_json(const boost::json::value& value, std::string& fault);

}  // namespace mctl
