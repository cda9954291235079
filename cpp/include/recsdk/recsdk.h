// The whole C++ interface of the engine.
#pragma once

#include "recsdk/checkpoint.h"    // IWYU pragma: export
#include "recsdk/columns.h"       // IWYU pragma: export
#include "recsdk/combine.h"       // IWYU pragma: export
#include "recsdk/device_table.h"  // IWYU pragma: export
#include "recsdk/error.h"         // IWYU pragma: export
#include "recsdk/export.h"        // IWYU pragma: export
#include "recsdk/freeze.h"        // IWYU pragma: export
#include "recsdk/index.h"         // IWYU pragma: export
#include "recsdk/initializer.h"   // IWYU pragma: export
#include "recsdk/join_rows.h"     // IWYU pragma: export
#include "recsdk/key_metadata.h"  // IWYU pragma: export
#include "recsdk/leavers.h"       // IWYU pragma: export
#include "recsdk/optimizer.h"     // IWYU pragma: export
#include "recsdk/policy.h"        // IWYU pragma: export
#include "recsdk/routing.h"       // IWYU pragma: export
#include "recsdk/row_file.h"      // IWYU pragma: export
#include "recsdk/row_layout.h"    // IWYU pragma: export
#include "recsdk/runtime.h"       // IWYU pragma: export
#include "recsdk/strings.h"       // IWYU pragma: export
#include "recsdk/table.h"         // IWYU pragma: export
#include "recsdk/types.h"         // IWYU pragma: export
#include "recsdk/vectors.h"       // IWYU pragma: export
