"""What runs within Redis: scripts that claim sessions, commit changes to them, give claims back, and sweep."""

# The scripts that run inside Redis, each as one transaction. A session is a hash with the fields version, seq, steps,
# opened, touched, fingerprint, state, the answers a0, a1 and so on, those of its lease (epoch, holder, until), and its
# last versions (line). A version is `count:random`: a Redis that is set back to an older copy counts the same numbers
# again, but never draws the same ones. Numbers are compared as texts: Lua's have 53 bits. Whatever somebody else has
# written to a key is the trouble of that session alone: a script that raises would fail all others in the tick. A lease
# that would last far longer than any that is given is from before the clock was set back, and counts no more: epochs
# protect the session without it.

CLAIM = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local longest = 10 * tonumber(ARGV[2])
local found = {}
for i, key in ipairs(KEYS) do
  local known, draw = ARGV[1 + 2 * i], ARGV[2 + 2 * i]
  local is = redis.pcall('HMGET', key, 'version', 'until', 'holder', 'line')
  local held = tonumber(is[2] or '') or 0
  local count = tonumber(string.match(is[1] or '', '^%d+') or '')
  if is.err then
    found[i] = {'1:' .. draw, 'damaged'}
  elseif not is[1] then
    found[i] = false
  elseif held > now and held - now <= longest and is[3] ~= ARGV[1] then
    found[i] = {'', held - now}
  elseif not count then
    redis.call('HSET', key, 'epoch', '1:' .. draw, 'holder', ARGV[1], 'until', now + tonumber(ARGV[2]))
    found[i] = {'1:' .. draw, 'damaged'}
  else
    local epoch = string.format('%.0f', count + 1) .. ':' .. draw
    redis.call('HSET', key, 'epoch', epoch, 'holder', ARGV[1], 'until', now + tonumber(ARGV[2]))
    if is[1] == known then
      found[i] = {epoch, is[1]}
    else
      local strayed = 0
      if known ~= '' then
        local ahead = count - tonumber(string.match(known, '^%d+'))
        local line = ' ' .. (is[4] or '')
        if ahead <= 0 or (ahead < 16 and is[4] and not string.find(line, ' ' .. known .. ' ', 1, true)) then
          strayed = 1
        end
      end
      local row = redis.call('HMGET', key, 'seq', 'steps', 'opened', 'touched', 'fingerprint', 'state')
      found[i] = {epoch, is[1], strayed, row[1], row[2], row[3], row[4], row[5], row[6]}
    end
  end
end
return found
"""

COMMIT = """
local names, touched = KEYS[#KEYS - 1], KEYS[#KEYS]
local life = tonumber(ARGV[1])
local versions = {}
local at = 2
for i = 1, #KEYS - 2 do
  local key = KEYS[i]
  local session, token, version = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  local gone, anew, seq, before = ARGV[at + 3] == '1', ARGV[at + 4] == '1', ARGV[at + 5], ARGV[at + 6]
  local fingerprint, stateful = ARGV[at + 10], ARGV[at + 11] == '1'
  local is = redis.pcall('HMGET', key, 'epoch', 'seq', 'fingerprint', 'version', 'line')
  local fits
  if is.err then
    fits = token ~= '' and (gone or anew)
  elseif token == '' then
    fits = not is[4]
  else
    fits = is[4] and is[1] == token
    if fits and not gone and not anew and is[2] ~= seq then
      fits = is[2] == before and is[3] == fingerprint
    end
  end
  if not fits then
    versions[i] = ''
  elseif gone then
    redis.call('DEL', key)
    redis.call('ZREM', names, session)
    redis.call('ZREM', touched, session)
    versions[i] = '0'
  else
    if anew then redis.call('DEL', key) end
    local line = is[5] or ''
    if line == '' and is[4] then line = is[4] .. ' ' end
    local held = select(2, string.gsub(line, ' ', ''))
    if held >= 16 then line = string.gsub(line, '^%S+ ', '') end
    redis.call('HSET', key, 'version', version, 'line', line .. version .. ' ', 'epoch', '', 'until', 0,
      'seq', seq, 'steps', ARGV[at + 7], 'opened', ARGV[at + 8], 'touched', ARGV[at + 9], 'fingerprint', fingerprint)
    if stateful then redis.call('HSET', key, 'state', ARGV[at + 12]) else redis.call('HDEL', key, 'state') end
    if ARGV[at + 13] ~= '' then redis.call('HSET', key, ARGV[at + 13], ARGV[at + 14]) end
    if life > 0 then redis.call('PEXPIRE', key, life) else redis.call('PERSIST', key) end
    redis.call('ZADD', names, 0, session)
    redis.call('ZADD', touched, ARGV[at + 9], session)
    versions[i] = version
  end
  at = at + 15
end
return versions
"""

RELEASE = """
for i, key in ipairs(KEYS) do
  if redis.pcall('HGET', key, 'epoch') == ARGV[i] then redis.call('HSET', key, 'until', 0) end
end
return {}
"""

SWEEP = """
local old = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', '(' .. ARGV[1], 'LIMIT', 0, tonumber(ARGV[2]))
for _, session in ipairs(old) do
  redis.call('DEL', ARGV[3] .. session)
  redis.call('ZREM', KEYS[1], session)
  redis.call('ZREM', KEYS[2], session)
end
return #old
"""
