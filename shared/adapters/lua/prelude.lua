-- Put before every script of the urgency set. Keys of one set, always these five in this order,
-- all under one hash tag (one slot in a cluster).
local ENTRIES, WAITING, PARKED, CLAIMED, EPOCH = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]

-- ENTRIES maps a request id to one string of fixed-width fields, so that tokens compare as text
-- and neither offsets nor scores pass through a Lua number, which would round them:
--   state 1 (w, p or c) | token 48 (epoch 19, offset 19, attempt 10) | arrival 19 | score
-- The sorted sets hold `arrival:request_id`: equal scores then sort by arrival, then id.
-- WAITING is scored by urgency, PARKED by due time, CLAIMED by the end of the lease (+inf: none).
local INDEX_OF = { w = WAITING, p = PARKED, c = CLAIMED }

local function state_of(entry) return string.sub(entry, 1, 1) end
local function token_of(entry) return string.sub(entry, 2, 49) end
local function score_of(entry) return string.sub(entry, 69) end
local function member_of(id, entry) return string.sub(entry, 50, 68) .. ':' .. id end
local function id_of(member) return string.sub(member, 21) end

-- Fence lower epochs; a higher one than stored begins here too, because a store that was wiped
-- or went back in time knows an older epoch than the owner does.
local function enter(epoch)
  local current = redis.call('GET', EPOCH)
  if current == epoch then return nil end
  if current and epoch < current then return redis.error_reply('FENCED ' .. current) end
  redis.call('DEL', ENTRIES, WAITING, PARKED, CLAIMED)
  redis.call('SET', EPOCH, epoch)
  return nil
end

local function forget(id, entry)
  redis.call('ZREM', INDEX_OF[state_of(entry)], member_of(id, entry))
  redis.call('HDEL', ENTRIES, id)
end

-- Move an entry to another state; returns it as it is now.
local function move(id, entry, state, rank)
  local moved = state .. string.sub(entry, 2)
  local member = member_of(id, entry)
  local from = INDEX_OF[state_of(entry)]
  if from ~= INDEX_OF[state] then redis.call('ZREM', from, member) end
  redis.call('ZADD', INDEX_OF[state], rank, member)
  redis.call('HSET', ENTRIES, id, moved)
  return moved
end

-- A reply of one string: clients read thousands of separate ones many times slower. (An empty
-- table would become an object.)
local function as_json(list) return #list == 0 and '[]' or cjson.encode(list) end

-- The entry when it exists with exactly this token, else nil.
local function holding(id, token)
  local entry = redis.call('HGET', ENTRIES, id)
  if entry and token_of(entry) == token then return entry end
  return nil
end
